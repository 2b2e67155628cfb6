# SPDX-License-Identifier: Apache-2.0
"""Prompts that fit the budget, and texts that grow past it: right from the first eviction on."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvfold
from kvfold.cache.fork import fork
from tests.helpers.budgets import (
    HOLDING,
    METHODS,
    SMALL,
    compressed,
    encodes,
    holds,
    is_uniform,
    merges,
)
from tests.helpers.models import build, continuation, prompts
from tests.helpers.truth import MOVES, MaskedDense, Reader, worst

EVICTING = [spec for spec in METHODS if not merges(spec) and not encodes(spec) and spec != "full"]
STREAMING = "streaming_llm"
# Column sums and rotated sinks are float32 in every model.
CLOSE = 2e-5


@pytest.fixture(scope="module")
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """One for kvfold, an equal one for the truth."""
    return build("llama", torch.float64), build("llama", torch.float64)


class Both:
    """A cache and the truth about it, which hides what the cache no longer holds."""

    def __init__(
        self, models, spec: str, lengths: tuple[int, ...], budget: float, padding: int = 0
    ):
        ids, mask = prompts((*lengths, max(lengths) + padding))
        self.ids, mask = ids[:-1], mask[:-1]
        padded = None if mask.all() else mask
        move = MOVES[kvfold.parse(spec).stages().positions]
        self.reader = Reader(models[0], compressed(models[0], spec, budget), padded)
        self.truth = MaskedDense(models[1], padded, move)
        self.off = 0.0

    @property
    def cache(self) -> kvfold.CompressedCache:
        return self.reader.cache

    def prompt(self, pieces: str = "whole") -> None:
        """Reads the prompt: at once, token by token, in turns of five, or in pieces of a turn."""
        mask, columns = self.reader.mask, self.ids.shape[1]
        size = {"whole": columns, "tokens": 1, "turns": 5, "pieces": 5}[pieces]
        parts = self.ids.split(size, 1)
        if mask is not None:
            self.reader.mask = self.truth.mask = mask[:, :size]
        if pieces != "pieces":
            self.read(*parts)
            return
        with self.cache.reading():
            for part in parts:
                self.compare(part)
        self.truth.hide(self.cache)

    def read(self, *parts: Tensor) -> None:
        for part in parts:
            self.compare(part)
            self.truth.hide(self.cache)

    def compare(self, part: Tensor) -> None:
        # Padding answers with whatever it likes.
        got, expected = self.reader(part), self.truth(part)
        self.off = max(self.off, worst(got, expected, (part > 0).long()))

    def steps(self, count: int, seed: int = 2) -> None:
        self.read(*continuation(len(self.ids), count, seed).split(1, 1))

    def question(self, through_fork: bool) -> None:
        """A question in a frozen block or by a fork, compared and taken back."""
        reader, mask = self.reader, self.reader.mask
        ids = continuation(len(self.ids), 5, seed=8)
        truth = copy.copy(self.truth)
        truth.cache = copy.deepcopy(truth.cache)
        expected = truth(ids)
        if through_fork:
            other = Reader(reader.model, fork(self.cache), mask)
            other.started = True
            got = other(ids)
        else:
            with self.cache.frozen():
                got = reader(ids)
                self.cache.crop(-5)
            reader.mask = mask
        self.off = max(self.off, worst(got, expected))

    def take_rows(self, rows: list[int]) -> None:
        """As beams do."""
        for side in (self.reader, self.truth):
            side.cache.reorder_cache(torch.tensor(rows))
            side.mask = None if side.mask is None else side.mask[rows]
        self.ids = self.ids[rows]
        self.truth.hide(self.cache)

    def go_on_with_a_copy(self) -> None:
        self.reader.cache = copy.deepcopy(self.cache)

    def evicted(self) -> bool:
        return any(layer.evicted_at for layer in self.cache.states)


# --- StreamingLLM, whose sinks move ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("lengths", "budget"),
    [
        ((20,), 20),
        ((15,), 20),
        ((40,), 64),
        ((3,), 20),
        ((20, 20), 20),
        ((20, 15), 20),
        ((64, 2), 20),  # the short row's sinks come after the long one's are moved
        ((15, 1), 20),
        ((64, 4), 0.4),
    ],
)
def test_sinks_move_from_the_first_eviction_on(models, lengths, budget):
    both = Both(models, STREAMING, lengths, budget)
    both.prompt()
    both.steps(30)
    assert both.evicted() and both.off <= CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("length", [15, 20])
def test_sinks_of_a_row_that_is_padded_from_the_start_move(models, length):
    both = Both(models, STREAMING, (length,), SMALL, padding=5)
    both.prompt()
    both.steps(12)
    assert both.evicted() and both.off <= CLOSE


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("pieces", ["tokens", "turns", "pieces"])
@pytest.mark.parametrize("lengths", [(15,), (20,), (37,), (20, 15)])
def test_sinks_move_however_the_prompt_is_read(models, lengths, pieces):
    both = Both(models, STREAMING, lengths, SMALL)
    both.prompt(pieces)
    both.steps(15)
    assert both.evicted() and both.off <= CLOSE


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize("steps", [4, 6, 20])
@pytest.mark.parametrize(
    "change",
    [
        Both.go_on_with_a_copy,
        lambda both: both.question(through_fork=False),
        lambda both: both.question(through_fork=True),
        lambda both: both.take_rows([1, 0, 1]),
        lambda both: both.read(continuation(2, 7, seed=5)),
    ],
    ids=["copy", "question", "fork", "rows", "turn"],
)
@pytest.mark.parametrize("lengths", [(15, 15), (15, 12)], ids=["alike", "padded"])
def test_sinks_move_whatever_happens_around_the_first_eviction(models, lengths, change, steps):
    both = Both(models, STREAMING, lengths, SMALL)
    both.prompt()
    both.steps(steps)
    change(both)
    both.steps(8, seed=4)
    assert both.evicted() and both.off <= CLOSE


@pytest.mark.parametrize("chunk", [4, 30])
def test_sinks_move_after_a_prompt_compressed_by_chunks(models, chunk):
    both = Both(models, STREAMING, (15,), SMALL)
    cache, new = both.cache, 12
    options = {"compress": "per_chunk", "prefill_chunk": chunk, "do_sample": False}
    out = kvfold.generate(models[0], both.ids, cache=cache, max_new_tokens=new, **options)
    alone = Both(models, STREAMING, (15,), SMALL)
    alone.prompt()
    for column in range(15, 15 + new):
        expected = alone.truth(out[:, column : column + 1])[:, -1].argmax(-1)
        alone.reader(out[:, column : column + 1])
        alone.truth.hide(alone.cache)
        if column + 1 < 15 + new:
            assert expected == out[:, column + 1]


@torch.no_grad()
def test_what_is_merged_into_sinks_moves_with_them(models):
    """Before the next token they are as merged; the same prompt without moving shows it."""
    ids = prompts((64,))[0]
    merged = []
    for spec in (STREAMING, f"{STREAMING}_original", f"{STREAMING}_original:decode=append"):
        rule = "" if spec.endswith("append") else " + merge:rule=d2o"
        cache = compressed(models[0], spec + rule)
        models[0](ids, past_key_values=cache)
        merged.append([layer.keys_as_given() for layer in cache.states])
    reindexed, original, plain = map(torch.stack, merged)
    assert torch.equal(reindexed, original)
    assert not torch.equal(reindexed[:, :, :, :4], plain[:, :, :, :4])


# --- every method ----------------------------------------------------------------------------


def scenario(both: Both, draw: random.Random) -> None:
    """A prompt that fits, single tokens past the budget, a turn, and what may lie between."""
    both.prompt(draw.choice(["whole", "tokens", "pieces"]))
    rows = len(both.ids)
    changes = [
        both.go_on_with_a_copy,
        lambda: both.question(through_fork=False),
        lambda: both.question(through_fork=True),
        lambda: both.take_rows([draw.randrange(rows) for _ in range(rows)]),
    ]
    both.steps(draw.randint(1, 8), seed=draw.randrange(100))
    draw.choice(changes)()
    both.steps(SMALL + 2 - both.ids.shape[1] + draw.randint(0, 6), seed=draw.randrange(100))
    draw.choice(changes)()
    both.read(continuation(rows, draw.randint(2, 9), seed=draw.randrange(100)))
    both.steps(4, seed=draw.randrange(100))


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("spec", EVICTING)
def test_texts_that_grow_past_the_budget_are_masked_dense(models, spec, seed):
    draw = random.Random(f"{spec} {seed}")
    lengths = tuple(draw.choice([1, 3, 9, 14, SMALL]) for _ in range(draw.randint(1, 3)))
    both = Both(models, spec, lengths, SMALL)
    scenario(both, draw)
    assert both.off <= CLOSE
    seen = both.cache.stats().seen_per_row
    if is_uniform(spec) and kvfold.parse(spec).takes_budget:
        most = [min(SMALL + (0 if holds(spec) else 4), tokens) for tokens in seen]
        assert all(
            row == [n, n] for of in both.cache.stats().kept for row, n in zip(of, most, strict=True)
        )


@pytest.mark.parametrize("spec", [spec for spec in HOLDING if not merges(spec)])
def test_what_is_hidden_matters(models, spec):
    """The truth tells an eviction from none, from the first step after it on."""
    both = Both(models, spec, (SMALL,), SMALL)
    both.prompt()
    both.steps(1)
    both.truth.stored.clear()
    both.compare(continuation(1, 1, seed=4))
    assert both.off > 0.05
