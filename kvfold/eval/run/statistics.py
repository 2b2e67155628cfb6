# SPDX-License-Identifier: Apache-2.0
"""Means over samples and paired differences, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from kvfold.eval.run.sample_result import SampleOutcome, SampleResult
from kvfold.evidence.estimates import (
    Estimate,
    PairedDifference,
    of_perplexities,
    of_scores,
    percent,
    perplexity,
)
from kvfold.evidence.intervals import Array, moments, student

PERPLEXITY = "perplexity"
# Properties in a sample's metadata by which scores are broken down.
BREAKDOWN = ("depth", "bucket", "length", "difficulty", "category", "subject", "level", "metric")


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
