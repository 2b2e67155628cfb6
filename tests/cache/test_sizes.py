# SPDX-License-Identifier: Apache-2.0
"""Sizes that leave nothing to choose: a ratio evicts nothing, and bytes are refused."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold import BudgetError, CompressedCache
from kvfold.methods.stages.when import AtEnd
from kvfold.store.encoding import EntrySize
from tests.helpers.budgets import COMPRESSING, encodes
from tests.helpers.caches import OVERSPENDING, decode, kept, start
from tests.helpers.models import build, prompts
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import Reader

ROUNDS = ["snapkv:window=4", "knorm", "adakv:window=4", "snapkv:window=4 + adakv", "lagkv"]


@pytest.fixture(scope="module")
def model():
    return build("llama", torch.float64)


def least_of(spec: str) -> int:
    """Entries that the method forces at any size."""
    return kvfold.parse(spec).stages().forced.least


@pytest.mark.slow
@pytest.mark.cases(3)
@pytest.mark.parametrize("spec", [s for s in COMPRESSING if "skip_layers" not in s])
def test_a_ratio_without_room_evicts_nothing(model, spec):
    """Neither while decoding nor in rounds: answers are those of the full cache."""
    reader = start(model, spec, budget=max(least_of(spec), 0.9) / 64)
    assert kept(reader.cache) == [64]
    assert reader.cache.stats().forced_over_budget and "no room" in str(reader.cache.stats())
    full = start(model, "full")
    if not encodes(spec):
        torch.testing.assert_close(decode(reader, 12), decode(full, 12))
        assert kept(reader.cache) == [76]


@pytest.mark.parametrize("spec", [s for s in COMPRESSING if s not in OVERSPENDING])
def test_a_ratio_with_room_for_one_is_met(model, spec):
    least = least_of(spec)
    cache = start(model, spec, budget=(least + 1) / 64).cache
    assert sum(sum(row) for layer in cache.stats().kept for row in layer) == 4 * 2 * (least + 1)
    assert not cache.stats().forced_over_budget


@pytest.mark.slow
@pytest.mark.parametrize("spec", [*ROUNDS, "kvzip:level=pair"])
def test_protected_spans_take_room(model, spec):
    with_room, without = (
        CompressedCache(model, spec, 0.5, tokenizer=word_tokenizer(), protect=[(2, stop)])
        for stop in (20, 40)
    )
    ids = prompts((64,))[0]
    for cache in (with_room, without):
        kvfold.generate(model, ids, cache=cache, max_new_tokens=1, do_sample=False)
    assert with_room.stats().kept_fraction < 0.6 and without.stats().kept_fraction == 1


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("spec", [*ROUNDS, "tova", "h2o", "streaming_llm", "triattention"])
def test_a_short_row_is_evicted_from_as_alone(model, spec, length):
    """A prompt of one token is no prefill alone, and one beside a longer row."""
    every = None if not isinstance(kvfold.parse(spec).stages().when, AtEnd) else 8
    ids, mask = prompts((40, length))
    alone = CompressedCache(model, spec, 0.5, every=every)
    padded = CompressedCache(model, spec, 0.5, every=every)
    own = {"max_new_tokens": 24, "do_sample": False}
    first = kvfold.generate(model, ids[1:, 40 - length :], cache=alone, **own)
    rows = kvfold.generate(model, ids, attention_mask=mask, cache=padded, **own)
    assert rows[1, 40:].tolist() == first[0, length:].tolist()
    assert [row[1] for row in padded.stats().kept] == [row[0] for row in alone.stats().kept]
    if length == 1:
        assert alone.stats().kept[0][0][0] == 24  # all but the last token, which is not read


@pytest.mark.parametrize("spec", ["snapkv:window=8", "snapkv:window=8 + adakv", "streaming_llm"])
def test_bytes_without_room_are_refused(model, spec):
    least = least_of(spec)
    entry = 4 * 2 * EntrySize(8, 8, 8).whole  # layers, heads
    assert kept(start(model, spec, budget=f"{least * entry}B").cache) == [least]
    with pytest.raises(BudgetError, match=rf"always keeps {least} .* hold {least - 1}: raise"):
        start(model, spec, budget=f"{(least - 1) * entry}B")
    cache = CompressedCache(model, spec, f"{(least - 1) * entry}B")
    Reader(model, cache)(prompts((least - 1,))[0])  # all of a short text fits
    assert kept(cache) == [least - 1]
