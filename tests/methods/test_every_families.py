# SPDX-License-Identifier: Apache-2.0
"""Rounds of ten scorers on six families: sizes, rows, pieces, copies, files, crops.

Each property runs on twenty pairs in which every scorer comes twice and every family three times at
least; `test_every_exactness.py` runs kept sets, and `test_every.py` logits, on all sixty.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import KvfoldError
from kvfold.cache.fork import fork
from tests.helpers.budgets import SMALL, compressed, sums_columns
from tests.helpers.caches import BATCHES, PADDED, decode, go_on, positions, same, start
from tests.helpers.contexts import new_model
from tests.helpers.models import FAMILIES, continuation, prompts
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import Reader, worst

SCORERS = ["knorm:skip_layers=none", "snapkv:window=8", "keydiff", "h2o:decode=append"]
SCORERS += ["adakv:window=8", "chunkkv:window=8", "rkv", "snapkv_decode"]
SCORERS += ["triattention:prompt=counted", "expected_attention"]
# Norms of queries and keys; half of each key rotated; sliding windows; sinks; recurrent layers
OF_SIX = ["llama", "qwen3", "phi3", "gemma3", "gpt_oss", "qwen3_5"]
SLIDING_OR_RECURRENT = OF_SIX[3:]
# With these the two do not evict while they write; the others do not, or first after 128 tokens.
APPENDING = {"rkv": "rkv:decode=append", "snapkv_decode": "snapkv_decode:decode=append"}
PAIRS = [(spec, OF_SIX[(i + by) % 6]) for by in (0, 3) for i, spec in enumerate(SCORERS)]
EACH = pytest.mark.parametrize(("spec", "family"), PAIRS)


@cache
def model_of(family: str) -> Any:
    return FAMILIES[family](torch.float64)


def every(spec: str, interval: int = 3) -> str:
    return f"{spec} + every:interval={interval}"


def limit(spec: str, family: str) -> float:
    """Sums of attention and recurrent states are float32 in every model."""
    recurrent = 1e-4 if family == "qwen3_5" else 0
    return max(recurrent, 2e-5 if sums_columns(spec) else 1e-6)


def test_every_scorer_and_every_family_comes_up():
    assert len(set(PAIRS)) == 20
    assert all([spec for spec, _ in PAIRS].count(one) == 2 for one in SCORERS)
    assert all([family for _, family in PAIRS].count(one) >= 3 for one in OF_SIX)


def entries(cache: kvfold.CompressedCache) -> set[float]:
    """Mean entries of a head, of each layer and row."""
    return {sum(row) / len(row) for layer in cache.stats().kept for row in layer}


@pytest.mark.slow
@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        (18, [18, 19, 20, 20, 21, 22, 20, 21, 22, 20]),
        (40, [20, 21, 22, 20, 21, 22, 20, 21, 22, 20]),
    ],
)
@EACH
def test_golden_sizes(spec, family, tokens, sizes):
    reader = start(model_of(family), every(spec), (tokens,))
    found = [entries(reader.cache)]
    for token in continuation(1, 9).split(1, 1):
        reader(token)
        found.append(entries(reader.cache))
    assert found == [{size} for size in sizes]


@pytest.mark.slow
@pytest.mark.cases(4)
@EACH
def test_an_interval_beyond_the_answer_is_append_bit_for_bit(spec, family):
    specs = every(spec, 9), APPENDING.get(spec, spec)
    readers = [start(model_of(family), one, PADDED) for one in specs]
    assert same(*(decode(reader, 8) for reader in readers))
    assert positions(readers[0].cache) == positions(readers[1].cache)


@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("family", OF_SIX)
def test_a_round_after_every_token_is_holding_bit_for_bit(family, lengths):
    in_rounds, held = (
        start(model_of(family), spec, lengths) for spec in (every("h2o:decode=append", 1), "h2o")
    )
    assert same(*(decode(reader, 14) for reader in (in_rounds, held)))
    assert positions(in_rounds.cache) == positions(held.cache)


@pytest.mark.slow
@pytest.mark.cases(3)
@EACH
def test_each_row_is_the_row_alone(spec, family):
    """The second row ends after 4 generated tokens."""
    lengths, ends = (40, 33, 15), (9, 4, 9)
    ids, mask = prompts(lengths)
    steps = continuation(3, 9)
    steps[1, 4:] = 0
    together = Reader(model_of(family), compressed(model_of(family), every(spec)), mask)
    together(ids)
    alone = []
    for row, length in enumerate(lengths):
        alone.append(Reader(model_of(family), compressed(model_of(family), every(spec))))
        alone[row](ids[row : row + 1, 40 - length :])
    for step, token in enumerate(steps.split(1, 1)):
        logits = together(token)
        for row, one in enumerate(alone):
            if step < ends[row]:
                expected = one(token[row : row + 1])
                assert worst(logits[row : row + 1], expected) <= limit(spec, family)
    for row, one in enumerate(alone):
        padding = 40 - lengths[row]
        for layer, expected in zip(positions(together.cache), positions(one.cache), strict=True):
            assert [[at - padding for at in head] for head in layer[row]] == expected[0]


@pytest.mark.cases(4)
@pytest.mark.slow
@EACH
def test_pieces_of_a_prompt_change_nothing(spec, family):
    ids, mask = prompts(PADDED)
    caches = [compressed(model_of(family), every(spec)) for _ in range(2)]
    outs = [
        go_on(model_of(family), ids, cache, attention_mask=mask, prefill_chunk=chunk)
        for cache, chunk in zip(caches, (None, 5), strict=True)
    ]
    assert torch.equal(*outs) and positions(caches[0]) == positions(caches[1])


@pytest.mark.slow
@pytest.mark.cases(4)
@EACH
def test_in_mid_answer_copies_and_forks_go_on_bit_for_bit(spec, family):
    reader = start(model_of(family), every(spec), PADDED)
    decode(reader, 4)
    mask = reader.mask
    twin = Reader(reader.model, copy.deepcopy(reader.cache), mask)
    forked = Reader(reader.model, fork(reader.cache), mask)
    twin.started = forked.started = True
    with reader.cache.frozen():
        unbounded = decode(reader, 3)
        reader.cache.crop(-3)
    reader.mask = mask
    assert same(decode(forked, 3), unbounded)
    assert same(decode(reader, 6), decode(twin, 6))
    assert positions(reader.cache) == positions(twin.cache)


@pytest.mark.slow
@EACH
def test_a_crop_to_the_last_round_goes_on_as_if_nothing_had_come(spec, family):
    """Sliding windows, recurrent layers and sums cannot take single tokens back, and say so."""
    reader = start(model_of(family), every(spec))
    decode(reader, 3)
    twin = copy.deepcopy(reader.cache)
    decode(reader, 2, seed=7)
    if sums_columns(spec) or family in SLIDING_OR_RECURRENT:
        before = positions(reader.cache)
        with pytest.raises(KvfoldError, match="scored since" if sums_columns(spec) else "older t"):
            reader.cache.crop(-2)
        assert positions(reader.cache) == before
        return
    with pytest.raises(KvfoldError, match="cannot take back"):
        reader.cache.crop(-3)
    reader.cache.crop(-2)
    assert worst(*(torch.cat(decode(one, 6)) for one in (reader, Reader(reader.model, twin)))) == 0
    assert positions(reader.cache) == positions(twin)


@cache
def wordy_model(family: str) -> Any:
    return new_model(family, torch.float64)


@pytest.mark.slow
@pytest.mark.cases(3)
@EACH
def test_a_saved_answer_goes_on_as_its_row_in_a_ragged_batch(spec, family, tmp_path):
    """A file holds one text: three of different lengths are saved and loaded in mid-answer."""
    model, tokenizer = wordy_model(family), word_tokenizer()
    words = ("the sky is blue and the grass is green " * 5).split()
    contexts = [
        kvfold.compress(model, tokenizer, " ".join(words[:count]), every(spec), SMALL)
        for count in (40, 33, 24)
    ]
    longest = contexts[0].ids.shape[1]
    ids = torch.cat(
        [torch.nn.functional.pad(each.ids, (longest - each.ids.shape[1], 0)) for each in contexts]
    )
    together = Reader(model, compressed(model, every(spec)), (ids > 0).long())
    together(ids)
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(3, 12, (3, 9), generator=generator)
    expected = [together(token) for token in steps.split(1, 1)]
    for row, context in enumerate(contexts):
        read = Reader(model, context.cache)
        for token in steps[row : row + 1, :4].split(1, 1):
            read(token)
        answered = torch.cat([context.ids, steps[row : row + 1, :4]], 1)
        object.__setattr__(context, "ids", answered)
        context.save(tmp_path / "context.kvfold")
        loaded = Reader(model, kvfold.load(tmp_path / "context.kvfold", model, tokenizer).cache)
        rest: list[Tensor] = []
        for token in steps[row : row + 1, 4:].split(1, 1):
            rest.append(loaded(token))
            assert torch.equal(rest[-1], read(token))
        batch = [logits[row : row + 1] for logits in expected[4:]]
        assert max(map(worst, rest, batch)) <= limit(spec, family)
        assert positions(loaded.cache) == positions(context.cache)
