# SPDX-License-Identifier: Apache-2.0
"""Statistics over positions of several prompts, with intervals bootstrapped over prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvfold.evidence.estimates import LARGEST, IntervalEstimate
from kvfold.evidence.intervals import Array

# Prompts `[R, n]` by index, R resamples → statistic `[R]`
Statistic = Callable[[NDArray[np.int64]], Array]

RESAMPLES = 1000
BLOCK = 50  # resamples at a time, which bounds the memory
LIMITS = (0.025, 0.975)


def bootstrapped(count: int, statistic: Statistic, seed: int = 0) -> IntervalEstimate:
    """`statistic` of `count` prompts, which are resampled as wholes (percentile bootstrap)."""
    drawn = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    value = float(statistic(np.arange(count)[None])[0])
    blocks = np.split(drawn, RESAMPLES // BLOCK)
    low, high = np.quantile(np.concatenate([*map(statistic, blocks)]), LIMITS)
    return IntervalEstimate(value, float(low), float(high))


def mean_of(values: Sequence[Sequence[float]]) -> Statistic:
    """Mean over all positions of the drawn prompts; `values[n]` are those of one prompt."""
    sums = np.array([float(np.sum(each)) for each in values])
    counts = np.array([len(each) for each in values])
    return lambda drawn: sums[drawn].sum(-1) / counts[drawn].sum(-1)


def exp_mean_of(values: Sequence[Sequence[float]]) -> Statistic:
    """exp of the mean over all positions: of lost log-likelihoods, the ratio of perplexities.

    Means above `LARGEST` nats count as that: their exp would be no number of JSON.
    """
    mean = mean_of(values)
    return lambda drawn: np.exp(np.minimum(mean(drawn), LARGEST))


def quantile_of(values: Sequence[Sequence[float]], part: float) -> Statistic:
    """Quantile over all positions of the drawn prompts."""
    longest = max(map(len, values))
    grid = np.full((len(values), longest), np.nan)
    for row, each in zip(grid, values, strict=True):
        row[: len(each)] = each
    return lambda drawn: np.nanquantile(grid[drawn].reshape(len(drawn), -1), part, axis=-1)


def ratio_of(above: Sequence[float], below: Sequence[float]) -> Statistic:
    """Sum over the drawn prompts of one quantity over the sum of another."""
    one, other = np.array(above, dtype=np.float64), np.array(below, dtype=np.float64)
    return lambda drawn: one[drawn].sum(-1) / other[drawn].sum(-1)
