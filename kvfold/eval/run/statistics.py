# SPDX-License-Identifier: Apache-2.0
"""Means over samples and paired differences, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from kvfold.eval.run.intervals import (
    Array,
    Moments,
    PairedMoments,
    bounded,
    moments,
    paired,
    paired_moments,
    student,
)
from kvfold.eval.run.sample_result import SampleOutcome, SampleResult

PERPLEXITY = "perplexity"
LARGEST = 300.0  # nats: squares of their exp are still finite
# Properties in a sample's metadata by which scores are broken down.
BREAKDOWN = ("depth", "bucket", "length", "difficulty", "category", "subject", "level", "metric")


class Estimate(BaseModel):
    """A mean over samples, its standard error, and its 95 % confidence limits.

    `count` is Kish's effective number of samples, which is n for equal weights. `error` is None for
    one sample; `low` and `high` are None if no interval is known, as for one sample's perplexity.
    """

    model_config = ConfigDict(frozen=True)

    value: float
    error: float | None
    low: float | None
    high: float | None
    count: float


class PairedDifference(BaseModel):
    """Mean difference to the full cache on the same samples, and its 95 % confidence limits.

    `worse` and `better` count samples that lost or gained quality. `gained` and `lost` are the mean
    gain and loss over all samples, `correlation` is that of the two. The latter three are None for
    a perplexity; the limits are None for one sample's perplexity.
    """

    model_config = ConfigDict(frozen=True)

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


def estimate(outcomes: Sequence[SampleOutcome], metric: str) -> Estimate:
    """Weighted mean of a metric over samples, in percent, or a perplexity.

    The samples are the independent units: answers about one context are averaged first.
    """
    of = moments(*_values(outcomes, metric))
    if metric != PERPLEXITY:
        return percent(of)
    value = perplexity(of.mean)
    if of.samples < 2:
        return Estimate(value=value, error=None, low=None, high=None, count=of.size)
    _, low, high = map(perplexity, student(of))
    # Delta method: standard error of exp(mean).
    error = value * math.sqrt(of.variance)
    return Estimate(value=value, error=error, low=low, high=high, count=of.size)


def difference(
    outcomes: Mapping[int, SampleOutcome], full: Mapping[int, SampleOutcome], metric: str
) -> PairedDifference | None:
    """Paired difference over the sample numbers in both; None if they share none."""
    shared = [index for index in outcomes if index in full]
    if not shared:
        return None
    ours, weights = _values([outcomes[index] for index in shared], metric)
    base, _ = _values([full[index] for index in shared], metric)
    gain = base - ours if metric == PERPLEXITY else ours - base
    made = (
        of_perplexities(ours, base, weights) if metric == PERPLEXITY else of_scores(gain, weights)
    )
    worse, better = int((gain < 0).sum()), int((gain > 0).sum())
    return made.model_copy(update={"worse": worse, "better": better})


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


def _values(outcomes: Sequence[SampleOutcome], metric: str) -> tuple[Array, Array]:
    """Weighted mean over each sample's answers `[n]`, and the samples' weights `[n]`."""
    values, weights = [], []
    for outcome in outcomes:
        weight = sum(answer.weight for answer in outcome.answers)
        scored = [
            (answer.nll if metric == PERPLEXITY else answer.scores[metric], answer.weight)
            for answer in outcome.answers
        ]
        values.append(sum((value or 0.0) * share for value, share in scored) / (weight or 1.0))
        weights.append(weight)
    return np.array(values, dtype=np.float64), np.array(weights, dtype=np.float64)


def breakdown(samples: Sequence[SampleResult], metric: str) -> dict[str, dict[str, Estimate]]:
    """Scores by each property of `BREAKDOWN` that has several values, and by turn if several."""
    found: dict[str, dict[str, Estimate]] = {}
    for name in BREAKDOWN:
        groups: dict[str, list[SampleOutcome]] = {}
        for sample in samples:
            if sample.metadata.get(name) is not None and sample.outcome is not None:
                groups.setdefault(str(sample.metadata[name]), []).append(sample.outcome)
        if len(groups) > 1:
            found[name] = {value: estimate(members, metric) for value, members in groups.items()}
    outcomes = [sample.outcome for sample in samples if sample.outcome is not None]
    turns = max((len(outcome.answers) for outcome in outcomes), default=0)
    for turn in range(turns if turns > 1 else 0):
        answered = [o for o in outcomes if len(o.answers) > turn]
        alone = [o.model_copy(update={"answers": (o.answers[turn],)}) for o in answered]
        found.setdefault("turn", {})[str(turn + 1)] = estimate(alone, metric)
    return found
