# SPDX-License-Identifier: Apache-2.0
"""95 % confidence intervals of means, valid for twenty samples and for scores of 0 and 1.

If all samples score the same, a bootstrap or a standard error gives ±0; these intervals do not.
Samples are in the last axis `[..., n]`, results are `[...]`, in double precision.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri, stdtrit

Array = NDArray[np.float64]

CONFIDENCE = 0.95
TAIL = (1 - CONFIDENCE) / 2
# Variances below this are rounding errors of 0.
NOTHING = 1e-15


class Interval(NamedTuple):
    """A mean and its 95 % confidence limits, each `[...]`."""

    value: Array
    low: Array
    high: Array


class Moments(NamedTuple):
    """A mean, the unbiased variance of that mean (0 for one sample), and the sample sizes.

    `size` is Kish's effective number of samples, which is n for equal weights; `samples` is n;
    `strata` is the number of pooled tasks. Theirs are also `guarded`, a variance that has what a
    task whose samples are all alike leaves open, and its degrees of `freedom`.
    """

    mean: Array
    variance: Array
    size: float
    samples: int
    strata: int = 1
    guarded: Array | None = None
    freedom: Array | None = None


class PairedMoments(NamedTuple):
    """Gains and losses on the same samples, in [0, 1], and the correlation of their means."""

    gained: Moments
    lost: Moments
    correlation: Array


def moments(values: Array, weights: Array) -> Moments:
    """Moments of independent `values [..., n]` with `weights [n]`."""
    count, share = values.shape[-1], weights / weights.sum()
    mean = (values * weights).sum(-1) / weights.sum()
    variance = np.square(share * (values - mean[..., None])).sum(-1) * count / max(count - 1, 1)
    kish = weights.sum() ** 2 / np.square(weights).sum()
    return Moments(mean, variance, float(kish), count)


def paired_moments(gains: Array, weights: Array) -> PairedMoments:
    """Positive and negative parts of differences `gains [..., n]` in [-1, 1], `weights [n]`."""
    up, down = np.maximum(gains, 0), np.maximum(-gains, 0)
    gained, lost = moments(up, weights), moments(down, weights)
    share, count = weights / weights.sum(), gains.shape[-1]
    apart = np.square(share) * (up - gained.mean[..., None]) * (down - lost.mean[..., None])
    shared = apart.sum(-1) * count / max(count - 1, 1)
    return PairedMoments(gained, lost, _ratio(shared, np.sqrt(gained.variance * lost.variance)))


def bounded(of: Moments) -> Interval:
    """Interval of a mean of scores in [0, 1].

    Clopper and Pearson's exact binomial interval, for the number of 0/1 trials whose variance would
    equal the measured one; for 0/1 scores that is the number of samples. Scores between 0 and 1
    vary less, so they count as more trials, as do tasks of unlike difficulty; uneven weights count
    as fewer. Without any variance it is the effective number of samples.

    Sources: Clopper and Pearson, Biometrika 26 (1934); Korn and Graubard, Survey Methodology 24
    (1998). Their correction for degrees of freedom is here the squared ratio of the normal to
    Student's quantile, so that a mean of many small scores gets Student's interval.
    """
    own = max(of.samples - of.strata, 1)
    guarded = of.variance if of.guarded is None else of.guarded
    freedom = own if of.freedom is None else of.freedom
    with np.errstate(divide="ignore", invalid="ignore"):
        alike, careful = (of.mean * (1 - of.mean) / each for each in (of.variance, guarded))
    careful = careful * (ndtri(TAIL) / stdtrit(freedom, TAIL)) ** 2
    least = np.minimum(alike * of.samples / own, of.size)
    size = np.where(of.variance > NOTHING, np.maximum(careful, least), of.size)
    right, wrong = of.mean * size, (1 - of.mean) * size
    low = betaincinv(np.maximum(right, NOTHING), wrong + 1, TAIL)
    high = betaincinv(right + 1, np.maximum(wrong, NOTHING), 1 - TAIL)
    return Interval(
        of.mean, np.where(right > NOTHING, low, 0.0), np.where(wrong > NOTHING, high, 1.0)
    )


def paired(of: PairedMoments) -> Interval:
    """Interval of a mean difference: gains minus losses, each `bounded`, combined by MOVER.

    If no sample differs, the interval still allows the rate of differences that `bounded` allows.
    Sources: Newcombe, Statistics in Medicine 17 (1998) 2635, method 10; Zou and Donner, Statistics
    in Medicine 27 (2008), the MOVER.
    """
    won, lost = bounded(of.gained), bounded(of.lost)
    value = won.value - lost.value
    low = _joined(won.value - won.low, lost.high - lost.value, of.correlation)
    high = _joined(won.high - won.value, lost.value - lost.low, of.correlation)
    return Interval(value, value - low, value + high)


def student(of: Moments) -> Interval:
    """Student's t interval of a mean of unbounded values; needs at least two samples."""
    far = -stdtrit(of.samples - 1, TAIL) * np.sqrt(of.variance)
    return Interval(of.mean, of.mean - far, of.mean + far)


def of_mean(values: Array) -> Interval:
    """Student's interval of the mean of `values [..., n]` of equal weight, n >= 2.

    A bootstrap of few values is too narrow.
    """
    return student(moments(values, np.ones(values.shape[-1])))


def pooled(parts: list[Moments], weights: list[float]) -> Moments:
    """Moments of the weighted mean of independent means; weights sum to 1."""
    share = np.array(weights)
    return Moments(
        np.sum([w * part.mean for w, part in zip(share, parts, strict=True)], 0),
        np.sum([w**2 * part.variance for w, part in zip(share, parts, strict=True)], 0),
        float(1 / np.sum(share**2 / np.array([part.size for part in parts]))),
        sum(part.samples for part in parts),
        sum(part.strata for part in parts),
    )


def pooled_scores(parts: list[Moments], weights: list[float]) -> Moments:
    """`pooled`, guarded for tasks of unlike difficulty; differences hold without.

    Source of the degrees of freedom: Satterthwaite, Biometrics Bulletin 2 (1946).
    """
    each = [w**2 * _guarded(part) for w, part in zip(weights, parts, strict=True)]
    spread = [one**2 / max(part.samples - 1, 1) for one, part in zip(each, parts, strict=True)]
    variance = np.sum(each, 0)
    freedom = np.square(variance) / np.sum(spread, 0)
    return pooled(parts, weights)._replace(guarded=variance, freedom=freedom)


def _guarded(of: Moments) -> Array:
    """Variance of a task's mean; if all samples are alike, as if one more were right and one wrong.

    Source: Laplace's rule of succession.
    """
    rate = (of.mean * of.size + 1) / (of.size + 2)
    return np.where(of.variance > NOTHING, of.variance, rate * (1 - rate) / of.size)


def pooled_pairs(parts: list[PairedMoments], weights: list[float]) -> PairedMoments:
    """Gains and losses of the weighted mean of independent differences; weights sum to 1."""
    gained = pooled([part.gained for part in parts], weights)
    lost = pooled([part.lost for part in parts], weights)
    each = [np.sqrt(part.gained.variance * part.lost.variance) * part.correlation for part in parts]
    shared = np.sum([w**2 * one for w, one in zip(weights, each, strict=True)], 0)
    return PairedMoments(gained, lost, _ratio(shared, np.sqrt(gained.variance * lost.variance)))


def combined(parts: list[Interval], weights: list[float]) -> Interval:
    """Interval of the weighted sum of independent estimates, lower and upper side apart (MOVER)."""
    value = np.sum([w * p.value for w, p in zip(weights, parts, strict=True)], 0)
    low = [w * (p.value - p.low) for w, p in zip(weights, parts, strict=True)]
    high = [w * (p.high - p.value) for w, p in zip(weights, parts, strict=True)]
    return Interval(
        value, value - np.sqrt(np.square(low).sum(0)), value + np.sqrt(np.square(high).sum(0))
    )


def _joined(one: Array, other: Array, correlation: Array) -> Array:
    """Half-width of the interval of a difference of two means with these half-widths (MOVER)."""
    return np.sqrt(np.maximum(one**2 + other**2 - 2 * correlation * one * other, 0))


def _ratio(shared: Array, spread: Array) -> Array:
    """Correlation from a covariance and the product of deviations; 0 if one does not vary."""
    varies = spread > NOTHING
    return np.where(varies, shared / np.where(varies, spread, 1), 0.0)
