# SPDX-License-Identifier: Apache-2.0
"""Evicted equals masked dense, full budget stock; chunks, padding and turns change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import CompressedCache
from tests.helpers.caches import counted_bytes, positions, reachable_bytes
from tests.helpers.truth import MaskedDense, Reader, stock_cache, worst

pytestmark = pytest.mark.real

TOKENS, BUDGET = 400, 0.3
EVICTING = ("snapkv", "pyramidkv", "adakv", "h2o", "knorm", "streaming_llm_original")
# Logits of 262 144 words take longer than the rest of Gemma-3-270M: of a turn's last tokens only.
LAST, FEW = {"logits_to_keep": 1}, {"logits_to_keep": 40}
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def steps(ids: Tensor) -> list[Tensor]:
    """The text goes on: three single tokens and a block."""
    return [*ids[:, TOKENS : TOKENS + 3].split(1, 1), ids[:, TOKENS + 3 : TOKENS + 15]]


@pytest.fixture(scope="module")
def unmasked(exact: Any, ids: Tensor) -> list[Tensor]:
    """Logits of the steps after the whole text."""
    reader = Reader(exact, stock_cache(exact))
    reader(ids[:, :TOKENS], **LAST)
    return [reader(piece) for piece in steps(ids)]


@pytest.mark.parametrize("spec", EVICTING)
def test_after_eviction_logits_are_masked_dense(exact, truth, ids, unmasked, spec):
    """In float64, and logits of the whole text are far from these."""
    cache = CompressedCache(exact, spec, BUDGET)
    reader, dense = Reader(exact, cache), MaskedDense(truth)
    reader(ids[:, :TOKENS], **LAST)
    dense(ids[:, :TOKENS], **LAST)
    dense.hide(cache)
    for piece, full in zip(steps(ids), unmasked, strict=True):
        expected = dense(piece)
        assert worst(reader(piece), expected) <= 1e-9
        assert worst(full, expected) > 0.05
        dense.hide(cache)


def test_kvzip_s_logits_are_masked_dense(exact, truth, tokenizer, text, ids):
    context = kvfold.compress(exact, tokenizer, text[:1200], "kvzip", BUDGET)
    reader, dense = Reader(exact, context.cache), MaskedDense(truth)
    dense(context.ids, **LAST)
    dense.hide(context.cache)
    with context.cache.frozen():
        for piece in steps(ids):
            assert worst(reader(piece), dense(piece)) <= 1e-9


def test_later_turns_are_masked_dense(exact, truth, ids):
    """A turn evicts at its end from all that is stored then."""
    cache = CompressedCache(exact, "snapkv", BUDGET)
    reader, dense = Reader(exact, cache), MaskedDense(truth)
    for turn in ids[:, : 3 * 200].split(200, 1):
        assert worst(reader(turn, **FEW), dense(turn, **FEW)) <= 1e-9
        dense.hide(cache)
    assert {n for layer in cache.stats().kept for n in layer[0]} == {int(BUDGET * 600)}
    assert worst(reader(ids[:, 600:601]), dense(ids[:, 600:601])) <= 1e-9


@pytest.mark.parametrize("spec", ["full", "snapkv", "pyramidkv", "knorm", "streaming_llm"])
def test_with_full_budget_logits_are_bit_identical_to_stock(model, ids, spec):
    prompt = ids[:, :TOKENS]
    options = GREEDY | {"output_logits": True, "return_dict_in_generate": True}
    everywhere = torch.ones_like(prompt)
    stock = model.generate(prompt, attention_mask=everywhere, **options)
    cache = CompressedCache(model, spec, None if spec == "full" else 1.0)
    ours = kvfold.generate(model, prompt, cache=cache, attention_mask=everywhere, **options)
    assert torch.equal(ours.sequences, stock.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, stock.logits, strict=True))


@pytest.mark.parametrize("spec", ["snapkv", "h2o", "kvzip"])
def test_chunks_equal_one_shot(exact, tokenizer, ids, spec):
    prompt = ids[:, :TOKENS]
    found = []
    for chunk in (None, 130):
        cache = CompressedCache(exact, spec, BUDGET, tokenizer=tokenizer)
        out = kvfold.generate(exact, prompt, cache=cache, prefill_chunk=chunk, **GREEDY)
        found.append((out.tolist(), positions(cache)))
    assert found[0] == found[1]


@pytest.mark.parametrize("spec", ["snapkv", "adakv", "h2o"])
def test_a_padded_row_is_its_prompt_alone(exact, ids, spec):
    short, padding = 250, TOKENS - 250
    rows = torch.cat([ids[:, :TOKENS], ids[:, 900 : 900 + TOKENS]])
    mask = torch.ones_like(rows)
    rows[1, :padding], mask[1, :padding] = 0, 0
    both, alone = (CompressedCache(exact, spec, BUDGET) for _ in range(2))
    together = kvfold.generate(exact, rows, cache=both, attention_mask=mask, **GREEDY)
    single = kvfold.generate(exact, rows[1:, padding:], cache=alone, **GREEDY)
    assert single.shape[1] == short + 8
    assert torch.equal(together[1, padding:], single[0])
    for layer, expected in zip(positions(both), positions(alone), strict=True):
        assert [[at - padding for at in head] for head in layer[1]] == expected[0]


@pytest.mark.parametrize("spec", ["snapkv", "adakv"])
def test_bytes_are_those_of_the_tensors_held(model, ids, full_layers, spec):
    full, cache = CompressedCache(model, "full"), CompressedCache(model, spec, BUDGET)
    for each in (full, cache):
        Reader(model, each)(ids[:, :TOKENS], **LAST)
        assert counted_bytes(each) == reachable_bytes(each)
    size = model.config.head_dim * 2 * 4
    entries = sum(n for layer in cache.stats().kept for row in layer for n in row)
    assert entries == len(full_layers) * model.config.num_key_value_heads * int(BUDGET * TOKENS)
    assert entries * size <= cache.stats().nbytes < 0.5 * full.stats().nbytes
