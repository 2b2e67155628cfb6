# SPDX-License-Identifier: Apache-2.0
"""What objects print of themselves: a few lines, and more on demand."""

import pytest
import torch

import kvfold
from kvfold import CompressedCache
from tests.helpers.models import build, prompts
from tests.helpers.tokenizers import WORDS, word_tokenizer

# Layers that are compressed: gemma3 here has as many with sliding windows.
COMPRESSED = {"llama": 4, "gemma3": 2}


@pytest.mark.parametrize("name", COMPRESSED)
def test_stats_print_in_a_few_lines_and_layer_by_layer_on_demand(name):
    model = build(name)
    cache = CompressedCache(model, "snapkv", 40)
    assert str(cache.stats()).count("\n") == 2
    with torch.no_grad():
        model(prompts((64,))[0], past_key_values=cache)
    stats = cache.stats()
    assert str(stats).splitlines() == [
        "snapkv, budget 40 tokens",
        "seen 64 tokens, kept 62.5% of the entries, 40 per layer and KV head",
        f"bytes {stats.nbytes:,} of {stats.nbytes_full:,} ({stats.ratio:.1%})",
    ]
    assert len(repr(stats)) < 150 and f"nbytes={stats.nbytes}" in repr(stats)
    details = stats.details()
    assert details.startswith(str(stats))
    assert f"keys and values {stats.kv_bytes:,} bytes" in details
    assert details.count("  kept 40") == COMPRESSED[name]
    assert details.count("DynamicSlidingWindowLayer, as it is") == 4 - COMPRESSED[name]


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
