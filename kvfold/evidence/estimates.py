# SPDX-License-Identifier: Apache-2.0
"""Estimates as records hold them: means, paired differences, quantiles, and intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel

from kvfold.evidence.intervals import (
    Array,
    Moments,
    PairedMoments,
    bounded,
    moments,
    paired,
    paired_moments,
    student,
)

LARGEST = 300.0  # nats: squares of their exp are still finite


@dataclass(frozen=True)
class IntervalEstimate:
    """A statistic and the limits of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def is_noise(self) -> bool:
        """True if the interval contains zero."""
        return self.low <= 0 <= self.high


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles | None:
        """The spread of `values`; None without values."""
        if not values:
            return None
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


class Estimate(BaseModel, frozen=True):
    """A mean over samples, its standard error, and its 95 % confidence limits.

    `count` is Kish's effective number of samples, which is n for equal weights. `error` is None for
    one sample; `low` and `high` are None if no interval is known, as for one sample's perplexity.
    """

    value: float
    error: float | None
    low: float | None
    high: float | None
    count: float


class PairedDifference(BaseModel, frozen=True):
    """Mean difference to the full cache on the same samples, and its 95 % confidence limits.

    `worse` and `better` count samples that lost or gained quality. `gained` and `lost` are the mean
    gain and loss over all samples, `correlation` is that of the two. The latter three are None for
    a perplexity; the limits are None for one sample's perplexity.
    """

    value: float
    low: float | None
    high: float | None
    samples: int
    worse: int = 0
    better: int = 0
    gained: Estimate | None = None
    lost: Estimate | None = None
    correlation: float | None = None

    @property
    def pair(self) -> PairedMoments | None:
        """Gains and losses as fractions in [0, 1]; None for a perplexity."""
        if self.gained is None or self.lost is None or self.correlation is None:
            return None
        gained, lost = shares(self.gained), shares(self.lost)
        return PairedMoments(gained, lost, np.array(self.correlation))


def percent(of: Moments) -> Estimate:
    """Estimate in percent of a mean of scores in [0, 1]."""
    found = bounded(of)
    error = 100 * math.sqrt(of.variance) if of.samples > 1 else None
    value, low, high = (100 * float(each) for each in found)
    return Estimate(value=value, error=error, low=low, high=high, count=of.size)


def shares(of: Estimate) -> Moments:
    """Inverse of `percent`: the moments behind an estimate, for pooling."""
    variance = np.array(((of.error or 0.0) / 100) ** 2)
    return Moments(np.array(of.value / 100), variance, of.count, max(round(of.count), 1))


def perplexity(loss: Array) -> float:
    """exp of a mean loss in nats, of at most `LARGEST`: larger ones are written alike."""
    return math.exp(min(float(loss), LARGEST))


def of_scores(gains: Array, weights: Array) -> PairedDifference:
    """Difference in percent, from per-sample `gains [n]` in [-1, 1] and `weights [n]`."""
    of = paired_moments(gains, weights)
    value, low, high = (100 * float(each) for each in paired(of))
    return PairedDifference(
        value=value,
        low=low,
        high=high,
        samples=len(gains),
        gained=percent(of.gained),
        lost=percent(of.lost),
        correlation=float(of.correlation),
    )


def of_perplexities(ours: Array, base: Array, weights: Array) -> PairedDifference:
    """Difference of two perplexities, from mean negative log-likelihoods `[n]` of each sample.

    The interval is the delta method's: to first order in each sample's contributions.
    """
    one, other = (perplexity(moments(nll, weights).mean) for nll in (ours, base))
    value, samples = one - other, len(weights)
    if samples < 2:
        return PairedDifference(value=value, low=None, high=None, samples=samples)
    spread = student(moments(one * ours - other * base, weights))
    far = float(spread.value - spread.low)
    return PairedDifference(value=value, low=value - far, high=value + far, samples=samples)
