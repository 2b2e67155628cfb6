# SPDX-License-Identifier: Apache-2.0
"""How often 95 % intervals hold the truth, at the sizes and the rates that tables show.

At least 93 % of seeded draws: 95 % less what 2,000 draws of a true 95 % leave open.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvfold.evidence.intervals import (
    Interval,
    bounded,
    moments,
    paired,
    paired_moments,
    pooled_pairs,
    pooled_scores,
    student,
)

DRAWS, LEAST = 2000, 0.93
RATES = (0.0, 0.02, 0.1, 0.5, 0.9, 0.98, 1.0)
# Shares of samples that gain and lose against the full cache.
DISCORDANT = (
    (0, 0), (0.01, 0), (0, 0.02), (0.05, 0), (0, 0.1), (0, 0.3), (0.02, 0.02), (0.05, 0.05),
    (0.05, 0.1), (0.15, 0.15),
)  # fmt: skip
TASKS = (2, 5, 8)


def held(found: Interval, truth: float) -> float:
    """The share of intervals that hold it."""
    return float(((found.low <= truth + 1e-9) & (truth - 1e-9 <= found.high)).mean())


def right(rng: np.random.Generator, rate: float, count: int) -> np.ndarray:
    """0/1 scores `[DRAWS, count]`."""
    return (rng.random((DRAWS, count)) < rate).astype(float)


def changed(rng: np.random.Generator, gain: float, loss: float, count: int) -> np.ndarray:
    """Differences of 0/1 scores `[DRAWS, count]`."""
    drawn = rng.random((DRAWS, count))
    return (drawn < gain).astype(float) - ((drawn >= gain) & (drawn < gain + loss))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


@pytest.mark.parametrize("count", [20, 100])
def test_yes_and_no(rng, count):
    for rate in RATES:
        assert held(bounded(moments(right(rng, rate, count), np.ones(count))), rate) >= LEAST, rate


@pytest.mark.parametrize("count", [20, 100])
def test_yes_and_no_with_uneven_weights(rng, count):
    weights = rng.integers(1, 6, count).astype(float)
    for rate in RATES:
        assert held(bounded(moments(right(rng, rate, count), weights)), rate) >= LEAST, rate


@pytest.mark.parametrize("count", [20, 100])
@pytest.mark.parametrize("kind", ["four values", "four of hard texts", "f1", "rouge", "rare loss"])
def test_scores_between_zero_and_one(rng, count, kind):
    shape = (DRAWS, count)
    scores, truth = {
        "four values": lambda: (rng.binomial(4, 0.98, shape) / 4, 0.98),
        "four of hard texts": lambda: (rng.binomial(4, rng.beta(8, 0.5, shape)) / 4, 8 / 8.5),
        "f1": lambda: (right(rng, 0.7, count) * rng.beta(2, 3, shape), 0.7 * 0.4),
        "rouge": lambda: (rng.beta(4, 16, shape), 0.2),
        "rare loss": lambda: (1 - right(rng, 0.05, count) * rng.random(shape), 0.975),
    }[kind]()
    assert held(bounded(moments(scores, np.ones(count))), truth) >= LEAST


@pytest.mark.parametrize("count", [20, 100])
def test_paired_differences(rng, count):
    for gain, loss in DISCORDANT:
        found = paired(paired_moments(changed(rng, gain, loss, count), np.ones(count)))
        assert held(found, gain - loss) >= LEAST, (gain, loss)
        # One of four values, in as many samples.
        part = paired(paired_moments(changed(rng, gain, loss, count) / 4, np.ones(count)))
        assert held(part, (gain - loss) / 4) >= LEAST, (gain, loss)


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, 100])
@pytest.mark.parametrize("tasks", TASKS)
def test_means_over_tasks(rng, count, tasks):
    mixed = [[rate] * tasks for rate in RATES]
    mixed += [[1.0] * (tasks - 1) + [0.9], list(np.linspace(0.5, 1, tasks))]
    for rates in mixed:
        assert held(mean_over(rng, rates, [count] * tasks), float(np.mean(rates))) >= LEAST, rates


@pytest.mark.parametrize("counts", [(40, 20), (40, 40), (20, 100), (100, 20)])
def test_means_of_a_solved_and_a_failed_task(rng, counts):
    """A task whose samples are all right, or all wrong, still leaves something open."""
    for rates in ((0.98, 0.05), (0.99, 0.05), (0.95, 0.1), (0.98, 0.1), (0.99, 0.02)):
        assert held(mean_over(rng, rates, counts), float(np.mean(rates))) >= LEAST, rates


def mean_over(rng: np.random.Generator, rates: Sequence[float], counts: Sequence[int]) -> Interval:
    """The interval of a mean over tasks with these rates of right answers."""
    drawn = [right(rng, rate, count) for rate, count in zip(rates, counts, strict=True)]
    parts = [moments(scores, np.ones(scores.shape[-1])) for scores in drawn]
    return bounded(pooled_scores(parts, [1 / len(parts)] * len(parts)))


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, 100])
@pytest.mark.parametrize("tasks", TASKS)
def test_mean_differences_over_tasks(rng, count, tasks):
    uneven = list(np.arange(1, tasks + 1) / np.arange(1, tasks + 1).sum())
    for gain, loss in DISCORDANT:
        parts = [
            paired_moments(changed(rng, gain, loss, count), np.ones(count)) for _ in range(tasks)
        ]
        assert held(paired(pooled_pairs(parts, uneven)), gain - loss) >= LEAST, (gain, loss)
    # Nearly all lost on one task, in fewer samples, and nearly nothing on the other.
    for losses in ((0.02, 0.95), (0.05, 0.9)):
        parts = [
            paired_moments(changed(rng, 0, loss, size), np.ones(size))
            for loss, size in zip(losses, (2 * count, count), strict=True)
        ]
        found = paired(pooled_pairs(parts, [0.5, 0.5]))
        assert held(found, -sum(losses) / 2) >= LEAST, losses
    # Lost on one task only.
    losses = [0.3, *[0.0] * (tasks - 1)]
    parts = [paired_moments(changed(rng, 0, loss, count), np.ones(count)) for loss in losses]
    assert held(paired(pooled_pairs(parts, [1 / tasks] * tasks)), -0.3 / tasks) >= LEAST


@pytest.mark.parametrize("count", [6, 20])
def test_log_likelihoods(rng, count):
    assert held(student(moments(rng.normal(5, 0.3, (DRAWS, count)), np.ones(count))), 5) >= LEAST


def test_what_the_bootstrap_made_of_it_does_not_hold(rng):
    """Percentiles of resamples: what this replaces, and that this test can fail."""
    scores = right(rng, 0.98, 20)
    rows = rng.integers(0, 20, (400, 20))
    low, high = np.quantile(scores[:300, rows].mean(-1), [0.025, 0.975], axis=1)
    assert held(Interval(scores[:300].mean(-1), low, high), 0.98) < 0.5
