# SPDX-License-Identifier: Apache-2.0
"""LagKV: entries that vary beside the next block's range, by hand and by golden numbers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.methods.lagkv import lag_scores
from kvfold.methods.observation import Observation
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import SHAPES, Head, assert_prefill, best, newest, per_head
from tests.helpers.observations import KEYS, T, observed

# Scores of entries 2 to 5, where entries 6 and 7 are the last block
OF_KEYS = [0.416884, 0.583116, 0.625921, 0.374079]
OF_VALUES = [0.511696, 0.488304, 0.803706, 0.196294]
GOLDEN = [0.464290, 0.535710, 0.714813, 0.285187]


@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize(
    ("values", "expected"),
    [(1.0, GOLDEN), (0.0, OF_KEYS), (1e6, OF_VALUES)],
    ids=["both", "keys", "values"],
)
def test_lagkv(left: int, values: float, expected: list[float]) -> None:
    scores = lag_scores(observed(left=left), sinks=2, lag=2, values=values)[0, 0, left:]
    torch.testing.assert_close(scores[2:6], torch.tensor(expected), atol=2e-6, rtol=0)
    assert 1 < scores[6] < scores[7]  # always above those of a block


def test_channels_that_are_constant_in_the_next_block_are_left_out() -> None:
    keys = KEYS.clone()
    keys[:, 1] = 0.5
    values = torch.zeros(T, 4)
    positions = torch.arange(T)[None, None]
    scores = lag_scores(Observation(keys[None, None], values[None, None], positions), 2, 2, 1.0)
    assert scores.isfinite().all()
    without = Observation(keys[None, None, :, [0, 2, 3]], values[None, None], positions)
    torch.testing.assert_close(lag_scores(without, 2, 2, 1.0), scores)


def deviation(block: Tensor, following: Tensor) -> list[float]:
    """Softmax over a block's tokens of their deviations, one token and channel at a time."""
    low, high = following.amin(0), following.amax(0)
    deviations = []
    for token in block:
        scaled = [float((x - a) / (b - a)) for x, a, b in zip(token, low, high, strict=True)]
        mean = sum(scaled) / len(scaled)
        deviations.append(math.sqrt(sum((y - mean) ** 2 for y in scaled) / (len(scaled) - 1)))
    weights = [math.exp(x) for x in deviations]
    return [weight / sum(weights) for weight in weights]


def by_block(head: Head, sinks: int, lag: int) -> list[list[float]]:
    """Scores of each block but the last."""
    blocks = (len(head) - sinks) // lag
    parts = [slice(sinks + b * lag, sinks + (b + 1) * lag) for b in range(blocks)]
    return [
        [
            (k + v) / 2
            for k, v in zip(
                deviation(head.keys[own], head.keys[after]),
                deviation(head.values[own], head.values[after]),
                strict=True,
            )
        ]
        for own, after in itertools.pairwise(parts)
    ]


def lagging(head: Head, budget: int, sinks: int, lag: int) -> list[int]:
    """The sinks, the end, and the best of each block; the earlier blocks keep one more."""
    scores = by_block(head, sinks, lag)
    if not scores:
        return list(range(sinks)) + newest(head, budget - sinks)
    end = len(head) - sinks - len(scores) * lag
    left = max(0, budget - sinks - end)
    kept = list(range(sinks)) + newest(head, min(end, budget - sinks))
    for block, of_block in enumerate(scores):
        share = left // len(scores) + (block < left % len(scores))
        kept += [sinks + block * lag + i for i in best(of_block, share)]
    return kept


def competing(head: Head, budget: int, sinks: int, lag: int) -> list[int]:
    """The same where blocks share nothing out."""
    flat = [score for block in by_block(head, sinks, lag) for score in block]
    end = len(head) - sinks - len(flat)
    kept = list(range(sinks)) + newest(head, min(end, budget - sinks))
    return kept + [sinks + i for i in best(flat, budget - len(kept))]


@pytest.mark.cases(2)
@pytest.mark.slow
@SHAPES
@pytest.mark.parametrize("preset", ["lagkv", "lagkv_kvpress", "lagkv_official"])
def test_blocks_keep_their_best(preset, heads, lengths):
    sinks = 5 if preset == "lagkv_official" else 4
    keep = per_head(lambda head: lagging(head, SMALL, sinks, 6))
    assert_prefill(f"{preset}:lag=6,sinks={sinks}", SMALL, heads, lengths, keep)


@pytest.mark.slow
@SHAPES
def test_blocks_may_compete(heads, lengths):
    keep = per_head(lambda head: competing(head, SMALL, 4, 6))
    assert_prefill("lagkv:lag=6,cross=true", SMALL, heads, lengths, keep)


def test_the_released_count_keeps_what_the_released_code_keeps() -> None:
    """At a budget of sinks, int(ratio · lag) a block, and the end, as that code spends it."""
    sinks, lag, ratio = 16, 1024, 0.01
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, 1, 2, 3 * lag + 50, 4, generator=generator)
    positions = torch.arange(keys.shape[2]).expand(1, 2, -1)
    stages = kvfold.parse("lagkv_official").stages()
    seen = Observation(keys, values, positions)
    scores = stages.score(seen)
    budget = sinks + 2 * int(ratio * lag) + lag + (keys.shape[2] - sinks) % lag
    counts = torch.full((1, 2), budget)
    slots = stages.select(seen, scores, positions < sinks, positions, counts)
    for head in range(2):
        one = Head(4, 1)
        one.positions = list(range(keys.shape[2]))
        one.keys, one.values = keys[0, head].double(), values[0, head].double()
        released = list(range(sinks)) + list(range(sinks + 2 * lag, keys.shape[2]))
        for block, of_block in enumerate(by_block(one, sinks, lag)):
            released += [sinks + block * lag + i for i in best(of_block, int(ratio * lag))]
        assert slots[0, head].tolist() == sorted(released)


@pytest.mark.parametrize("options", ["sinks=-1", "lag=0", "values=-1", "values=nan"])
def test_options_out_of_range_are_refused(options: str) -> None:
    with pytest.raises(kvfold.KvfoldError, match=rf"lagkv:{options.partition('=')[0]} is .*, not "):
        kvfold.parse(f"lagkv:{options}")
