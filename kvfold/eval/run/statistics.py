# SPDX-License-Identifier: Apache-2.0
"""Means over samples, how sure they are, and differences on the same samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from pydantic import BaseModel, ConfigDict

from kvfold.eval.run.sample import Outcome, Sample

RESAMPLES, CONFIDENCE = 2000, 0.95
PERPLEXITY = "perplexity"
# What samples tell of themselves that a score is read by.
BREAKDOWN = ("depth", "bucket", "length", "difficulty", "category", "subject", "level")


class Estimate(BaseModel):
    """A mean over samples and its standard error; None where one sample says nothing of it."""

    model_config = ConfigDict(frozen=True)

    value: float
    error: float | None


class Difference(BaseModel):
    """Against the full cache on the same samples: the mean, and where 95 % of resamples lie.

    `worse` and `better` count samples that lost or gained by the metric, whichever way it points.
    """

    model_config = ConfigDict(frozen=True)

    value: float
    low: float
    high: float
    samples: int
    worse: int
    better: int


def estimate(outcomes: Sequence[Outcome], metric: str) -> Estimate:
    """The weighted mean over samples, and its standard error with them as units.

    Questions about one context are not independent: a sample's are averaged first.
    """
    values, weights = _values(outcomes, metric)
    mean = float((values * weights).sum() / weights.sum())
    error = None
    count = len(outcomes)
    if count > 1:
        apart = (weights * (values - mean)).square().sum() * count / (count - 1)
        error = float(apart.sqrt() / weights.sum())
    if metric != PERPLEXITY:
        return Estimate(value=100 * mean, error=None if error is None else 100 * error)
    # The error of an exponential, to first order.
    value = math.exp(mean)
    return Estimate(value=value, error=None if error is None else value * error)


def difference(
    outcomes: Mapping[int, Outcome], full: Mapping[int, Outcome], metric: str
) -> Difference | None:
    """The paired bootstrap over the samples that both have; None where there are none."""
    shared = [index for index in outcomes if index in full]
    if not shared:
        return None
    count = len(shared)
    ours, weights = _values([outcomes[index] for index in shared], metric)
    base, base_weights = _values([full[index] for index in shared], metric)
    drawn = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    scale = _scale(metric)
    gain = base - ours if metric == PERPLEXITY else ours - base

    def apart(rows: torch.Tensor) -> torch.Tensor:
        mean = (ours * weights)[rows].sum(-1) / weights[rows].sum(-1)
        other = (base * base_weights)[rows].sum(-1) / base_weights[rows].sum(-1)
        return scale(mean) - scale(other)

    tail = (1 - CONFIDENCE) / 2
    low, high = apart(drawn).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Difference(
        value=float(apart(torch.arange(count)[None])),
        low=low,
        high=high,
        samples=count,
        worse=int((gain < 0).sum()),
        better=int((gain > 0).sum()),
    )


def _scale(metric: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.exp if metric == PERPLEXITY else lambda mean: 100 * mean


def _values(outcomes: Sequence[Outcome], metric: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sample's mean over its answers `[n]`, and its weight `[n]`, in double precision."""
    values, weights = [], []
    for outcome in outcomes:
        weight = sum(answer.weight for answer in outcome.answers)
        scored = [
            (answer.nll if metric == PERPLEXITY else answer.scores[metric], answer.weight)
            for answer in outcome.answers
        ]
        values.append(sum((value or 0.0) * share for value, share in scored) / (weight or 1.0))
        weights.append(weight)
    return torch.tensor(values, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)


def breakdown(samples: Sequence[Sample], metric: str) -> dict[str, dict[str, Estimate]]:
    """The score by what tells samples apart, and by turn where there are several."""
    found: dict[str, dict[str, Estimate]] = {}
    for name in BREAKDOWN:
        groups: dict[str, list[Outcome]] = {}
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
