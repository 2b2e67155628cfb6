# SPDX-License-Identifier: Apache-2.0
"""What stats count and print: bytes, sizes of heads, layers on demand."""

from __future__ import annotations

import re

import pytest
import torch

import kvfold
from kvfold import CompressedCache
from tests.helpers.budgets import (
    compressed,
)
from tests.helpers.caches import (
    PADDED,
    decode,
    kept,
    reachable_bytes,
    start,
)
from tests.helpers.models import build, continuation, prompts
from tests.helpers.tokenizers import WORDS, word_tokenizer
from tests.helpers.truth import Reader, stock_cache

# Layers that are compressed: gemma3 here has as many with sliding windows.
COMPRESSED = {"llama": [0, 1, 2, 3], "gemma3": [1, 3]}


@pytest.fixture(scope="module")
def model():
    return build("llama", torch.float64)


@pytest.mark.parametrize("name", COMPRESSED)
def test_stats_print_in_a_few_lines_and_layer_by_layer_on_demand(name):
    model = build(name)
    cache = CompressedCache(model, "snapkv", 40)
    assert str(cache.stats()).count("\n") == 2
    with torch.no_grad():
        model(prompts((64,))[0], past_key_values=cache)
    stats = cache.stats()
    others = list(cache.other_layers().values())
    assert stats.other_bytes == reachable_bytes(others) > 0 or name == "llama"
    beside = f", beside {stats.other_bytes:,} of 2 other layers" if others else ""
    assert str(stats).splitlines() == [
        "snapkv, budget 40 tokens",
        "seen 64 tokens, kept 62.5% of the entries, 40 per layer and KV head",
        f"bytes {stats.nbytes:,} of {stats.nbytes_full:,} ({stats.ratio:.1%}){beside}",
    ]
    assert len(repr(stats)) < 150 and f"nbytes={stats.nbytes}" in repr(stats)
    details = stats.details()
    assert details.startswith(str(stats))
    assert f"keys and values {stats.kv_bytes:,} bytes" in details
    shown = re.findall(r"layer +(\d+)  kept 40", details)
    assert [*map(int, shown)] == COMPRESSED[name]
    assert details.count("DynamicSlidingWindowLayer, as it is") == 4 - len(COMPRESSED[name])


@pytest.mark.parametrize("beyond", [1, 40])
@pytest.mark.parametrize("given", ["input_ids", "inputs_embeds"])
def test_a_window_holds_nothing_of_the_prompt_before_it(beyond, given):
    model = build("gemma3")
    cache = CompressedCache(model, "snapkv", 40)
    prompt = prompts((model.config.sliding_window + beyond,))[0]

    def read(ids):
        tokens = ids if given == "input_ids" else model.get_input_embeddings()(ids)
        with torch.no_grad():
            model(**{given: tokens}, past_key_values=cache)

    read(prompt)
    for layer in cache.other_layers().values():
        assert layer.keys.shape[2] == model.config.sliding_window - 1
        assert reachable_bytes([layer.keys, layer.values]) == 2 * layer.keys.nbytes
    read(prompt[:, :1])  # a step leaves them as transformers does, views one entry longer
    for layer in cache.other_layers().values():
        longer = model.config.sliding_window / (model.config.sliding_window - 1)
        assert reachable_bytes([layer.keys]) == layer.keys.nbytes * longer


def test_heads_of_unequal_sizes_print_their_range():
    model = build("llama")
    cache = CompressedCache(model, "adakv", 40)
    with torch.no_grad():
        model(prompts((64,))[0], past_key_values=cache)
    counts = [n for layer in cache.stats().kept for row in layer for n in row]
    assert f", {min(counts)} to {max(counts)} per layer" in str(cache.stats())


def test_a_context_prints_in_a_line():
    model = build("llama")
    context = kvfold.compress(model, word_tokenizer(), " ".join(WORDS * 3), "snapkv", 40)
    shown = repr(context)
    assert len(shown) < 200 and "\n" not in shown
    assert shown == (
        f"Context(model=LlamaForCausalLM, method='snapkv', budget='40 tokens', "
        f"tokens={context.ids.shape[1]}, nbytes={context.stats().nbytes})"
    )


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "gpt_neox"])
def test_full_bytes_are_those_of_the_stock_cache(name):
    model = build(name, torch.bfloat16)
    reader = start(model, "snapkv:window=8", PADDED)
    decode(reader, 3)
    stock = Reader(model, stock_cache(model), prompts(PADDED)[1])
    stock(prompts(PADDED)[0])
    for token in continuation(3, 3).split(1, 1):
        stock(token)
    own = {i for i, x in enumerate(reader.cache.layers) if x in reader.cache.compressed_layers}
    tensors = [x for i in own for x in (stock.cache.layers[i].keys, stock.cache.layers[i].values)]
    assert reader.cache.stats().nbytes_full == sum(t.numel() * t.element_size() for t in tensors)


def test_a_small_budget_costs_few_bytes(model):
    reader = Reader(model, compressed(model, "snapkv:window=8", 0.1))
    reader(prompts((2000,))[0])
    stats = reader.cache.stats()
    assert kept(reader.cache) == [200]
    assert stats.nbytes < 0.2 * stats.nbytes_full and stats.ratio < 0.2
    assert reachable_bytes(reader.cache) < 0.2 * stats.nbytes_full


def test_a_budget_in_bytes_is_not_exceeded(model):
    cache = compressed(model, "knorm", "40000B")
    Reader(model, cache)(prompts((300,))[0])
    stats = cache.stats()
    assert 0.9 * 40000 < stats.kv_bytes + stats.position_bytes <= 40000


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_windows_hold_no_more_of_a_prompt_than_transformers_would_read_on(name):
    """transformers' own are views of the prompt's tensors until the next forward."""
    model = build(name)
    reader = start(model, "snapkv:window=8")
    stock = Reader(model, stock_cache(model))
    stock(prompts((64,))[0])
    expected = 0
    for at, layer in reader.cache.other_layers().items():
        for mine, theirs in ((layer.keys, stock.cache.layers[at].keys),
                             (layer.values, stock.cache.layers[at].values)):  # fmt: skip
            assert mine.shape[2] == 15 and torch.equal(mine, theirs)
            expected += theirs.numel() * theirs.element_size()
    found = sum(
        reachable_bytes([layer.keys, layer.values])
        for layer in reader.cache.other_layers().values()
    )
    assert found == expected > 0


def test_a_row_that_ended_early_takes_nothing_from_the_compressed_text(model):
    ids = torch.cat([prompts((64,))[0], prompts((64,))[0].flip(1)])
    how = {"do_sample": False, "max_new_tokens": 60, "pad_token_id": 0}
    said = kvfold.generate(model, ids, cache=CompressedCache(model, "snapkv:window=4", 8), **how)
    end = next(token for token in said[0, 64:].tolist() if token not in said[1, 64:])
    cache = CompressedCache(model, "snapkv:window=4", 8)
    out = kvfold.generate(model, ids, cache=cache, eos_token_id=end, **how)
    ended = out[0].tolist().index(end, 64) - 64 + 1
    stats = cache.stats()
    added = stats.mean_kept - 8
    assert ended < 50 and added == (ended + 59) / 2
    assert stats.later == added
    assert f"of these 8 of the compressed text, {added:.0f} added after it" in str(stats)
