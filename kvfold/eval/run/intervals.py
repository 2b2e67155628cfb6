# SPDX-License-Identifier: Apache-2.0
"""95 % intervals of means that hold at twenty samples, and at scores of 0 and 1.

A bootstrap or a standard error says "±0" where all samples scored the same; these do not. Samples
are in the last axis `[..., n]`, results are `[...]`, in double precision.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri, stdtrit

Array = NDArray[np.float64]

CONFIDENCE = 0.95
TAIL = (1 - CONFIDENCE) / 2
# What rounding leaves of a variance that is 0.
NOTHING = 1e-15


class Interval(NamedTuple):
    """A mean and where it is with 95 % confidence, each `[...]`."""

    value: Array
    low: Array
    high: Array


class Moments(NamedTuple):
    """A mean, the variance of that mean (unbiased; 0 where it is of one sample), and of how much.

    `size` is the number of samples, Kish's effective one where weights differ; `strata` are the
    tasks that were pooled, of `samples` in all.
    """

    mean: Array
    variance: Array
    size: float
    samples: int
    strata: int = 1


class Pair(NamedTuple):
    """What was gained and lost on the same samples, as shares in [0, 1], and their correlation."""

    gained: Moments
    lost: Moments
    correlation: Array


def moments(values: Array, weights: Array) -> Moments:
    """Of independent `values [..., n]` with `weights [n]`."""
    count, share = values.shape[-1], weights / weights.sum()
    mean = (values * weights).sum(-1) / weights.sum()
    variance = np.square(share * (values - mean[..., None])).sum(-1) * count / max(count - 1, 1)
    kish = weights.sum() ** 2 / np.square(weights).sum()
    return Moments(mean, variance, float(kish), count)


def pair(gains: Array, weights: Array) -> Pair:
    """Of differences `gains [..., n]` in [-1, 1] on the same samples."""
    up, down = np.maximum(gains, 0), np.maximum(-gains, 0)
    gained, lost = moments(up, weights), moments(down, weights)
    share, count = weights / weights.sum(), gains.shape[-1]
    apart = np.square(share) * (up - gained.mean[..., None]) * (down - lost.mean[..., None])
    shared = apart.sum(-1) * count / max(count - 1, 1)
    return Pair(gained, lost, _ratio(shared, np.sqrt(gained.variance * lost.variance)))


def bounded(of: Moments) -> Interval:
    """Where a mean of scores in [0, 1] is.

    Clopper and Pearson's exact interval, for as many yes-or-no answers as would have the variance
    that was measured: of 0/1 scores it is their own. No fewer than there are samples, as no score
    in [0, 1] spreads more than 0/1 does (fewer only by uneven weights); where nothing varies, as
    many as there are. Sources: Clopper and Pearson, Biometrika 26 (1934); Korn and Graubard,
    Survey Methodology 24 (1998), whose factor for the degrees of freedom is here Student's over the
    normal quantile, so that many small scores get Student's interval.
    """
    freedom = max(of.samples - of.strata, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        alike = of.mean * (1 - of.mean) / of.variance
    careful = alike * (ndtri(TAIL) / stdtrit(freedom, TAIL)) ** 2
    least = np.minimum(alike * of.samples / freedom, of.size)
    size = np.where(of.variance > NOTHING, np.maximum(careful, least), of.size)
    right, wrong = of.mean * size, (1 - of.mean) * size
    low = betaincinv(np.maximum(right, NOTHING), wrong + 1, TAIL)
    high = betaincinv(right + 1, np.maximum(wrong, NOTHING), 1 - TAIL)
    return Interval(
        of.mean, np.where(right > NOTHING, low, 0.0), np.where(wrong > NOTHING, high, 1.0)
    )


def paired(of: Pair) -> Interval:
    """Where a mean difference is: what was gained and what was lost are `bounded` by themselves.

    Where no sample differs, as many may still as `bounded` leaves open. Sources: Newcombe,
    Statistics in Medicine 17 (1998) 2635, method 10; Zou and Donner, Statistics in Medicine 27
    (2008), the MOVER.
    """
    won, lost = bounded(of.gained), bounded(of.lost)
    value = won.value - lost.value
    low = _joined(won.value - won.low, lost.high - lost.value, of.correlation)
    high = _joined(won.high - won.value, lost.value - lost.low, of.correlation)
    return Interval(value, value - low, value + high)


def student(of: Moments) -> Interval:
    """Where a mean without bounds is, of more than one sample, by Student's t."""
    far = -stdtrit(of.samples - 1, TAIL) * np.sqrt(of.variance)
    return Interval(of.mean, of.mean - far, of.mean + far)


def pooled(parts: list[Moments], weights: list[float]) -> Moments:
    """The weighted mean of independent means; weights sum to 1."""
    share = np.array(weights)
    return Moments(
        np.sum([w * part.mean for w, part in zip(share, parts, strict=True)], 0),
        np.sum([w**2 * part.variance for w, part in zip(share, parts, strict=True)], 0),
        float(1 / np.sum(share**2 / np.array([part.size for part in parts]))),
        sum(part.samples for part in parts),
        sum(part.strata for part in parts),
    )


def pooled_pairs(parts: list[Pair], weights: list[float]) -> Pair:
    """The weighted mean of independent differences; weights sum to 1."""
    gained = pooled([part.gained for part in parts], weights)
    lost = pooled([part.lost for part in parts], weights)
    each = [np.sqrt(part.gained.variance * part.lost.variance) * part.correlation for part in parts]
    shared = np.sum([w**2 * one for w, one in zip(weights, each, strict=True)], 0)
    return Pair(gained, lost, _ratio(shared, np.sqrt(gained.variance * lost.variance)))


def combined(parts: list[Interval], weights: list[float]) -> Interval:
    """The weighted sum of independent estimates, each side for itself (MOVER)."""
    value = np.sum([w * p.value for w, p in zip(weights, parts, strict=True)], 0)
    low = [w * (p.value - p.low) for w, p in zip(weights, parts, strict=True)]
    high = [w * (p.high - p.value) for w, p in zip(weights, parts, strict=True)]
    return Interval(
        value, value - np.sqrt(np.square(low).sum(0)), value + np.sqrt(np.square(high).sum(0))
    )


def _joined(one: Array, other: Array, correlation: Array) -> Array:
    """How far a difference reaches whose parts reach `one` and `other`."""
    return np.sqrt(np.maximum(one**2 + other**2 - 2 * correlation * one * other, 0))


def _ratio(shared: Array, spread: Array) -> Array:
    """A correlation; 0 where one of the two does not vary."""
    varies = spread > NOTHING
    return np.where(varies, shared / np.where(varies, spread, 1), 0.0)
