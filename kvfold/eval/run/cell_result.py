# SPDX-License-Identifier: Apache-2.0
"""Records of cells: mean score with its interval, and the difference to the full cache."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
from pydantic import BaseModel

from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.sample_result import SampleOutcome, SampleResult
from kvfold.eval.tasks import Task
from kvfold.evidence.estimates import (
    Estimate,
    PairedDifference,
    of_perplexities,
    of_scores,
    percent,
    perplexity,
)
from kvfold.evidence.grouped import grouped
from kvfold.evidence.intervals import Array, moments, student
from kvfold.measure.machine import MachineSetup

PERPLEXITY = "perplexity"
# Properties in a sample's metadata by which scores are broken down.
BREAKDOWN = (
    "depth", "distance", "wording", "bucket", "length", "difficulty", "category", "subject",
    "level", "metric",
)  # fmt: skip


class CellResult(BaseModel, frozen=True):
    """The record of one cell.

    score: the task's metric in percent, or a perplexity if `lower_is_better`; `scores` has all
        metrics, `by` the score per value of a sample's property such as depth.
    difference: to the full cache on the same samples; None for the full cache itself.
    kept_nominal, kept: the ratio asked for; entries stored over entries seen, mean over samples.
    nbytes, nbytes_full, tokens, prefill_seconds: means over samples. `peak_bytes` is a maximum.
    seconds_per_token, answer_tokens: over all answers.
    prefill_operations, step_operations: means over the samples where they were counted.
    truncated, at_limit: number of truncated samples; of answers that reached `max_new_tokens`.
    failed, errors: predictions that `metric` could not parse or score, and samples without an
        answer, counted by reason.
    haystack: name of the text that needles were hidden in, if any.
    """

    cell: EvalCell
    benchmark: str
    group: str
    haystack: str | None
    phase: str
    metric: str | None
    lower_is_better: bool
    samples: int
    questions: int
    score: Estimate | None
    scores: dict[str, Estimate]
    difference: PairedDifference | None
    by: dict[str, dict[str, Estimate]]
    kept_nominal: float | None
    kept: float | None
    kept_per_layer: tuple[float, ...]
    nbytes: float | None
    nbytes_full: float | None
    peak_bytes: int | None
    tokens: float | None
    prefill_seconds: float | None
    seconds_per_token: float | None
    answer_tokens: float | None
    prefill_operations: float | None = None
    step_operations: float | None = None
    truncation: str
    truncated: int
    at_limit: int
    failed: dict[str, int]
    errors: dict[str, int]
    commits: tuple[str | None, ...]
    setups: tuple[MachineSetup, ...]

    @property
    def bytes_ratio(self) -> float | None:
        """Measured cache bytes over the full cache's."""
        if self.nbytes is None or not self.nbytes_full:
            return None
        return self.nbytes / self.nbytes_full


def cell_result(
    task: Task, cell: EvalCell, samples: Sequence[SampleResult], full: Sequence[SampleResult]
) -> CellResult:
    """The record of a cell; `full` are the samples of its reference cell.

    Samples are matched by number, so their order does not matter.
    """
    samples = sorted(samples, key=lambda sample: sample.index)
    outcomes = {s.index: s.outcome for s in samples if s.outcome is not None}
    base = {s.index: s.outcome for s in full if s.outcome is not None}
    names = [PERPLEXITY] if task.by_likelihood else list(task.metrics)
    metric = names[0] if names else None
    scores = {name: estimate(list(outcomes.values()), name) for name in names if outcomes}
    answers = [answer for outcome in outcomes.values() for answer in outcome.answers]
    held = [outcome.held for outcome in outcomes.values()]
    layers = zip(*(one.kept_per_layer for one in held), strict=True)
    tokens = sum(answer.tokens for answer in answers)
    answering = sum(outcome.answer_seconds for outcome in outcomes.values())
    itself = cell == cell.reference
    nominal = float(cell.budget) if cell.budget and "." in cell.budget else None
    return CellResult(
        cell=cell,
        benchmark=task.benchmark,
        group=task.group,
        haystack=next((s.metadata["haystack"] for s in samples if "haystack" in s.metadata), None),
        phase=task.phase,
        metric=metric,
        lower_is_better=task.by_likelihood,
        samples=len(outcomes),
        questions=len(answers),
        score=scores[names[0]] if scores else None,
        scores=scores,
        difference=difference(outcomes, base, names[0]) if scores and not itself else None,
        by=breakdown([s for s in samples if s.outcome], names[0]) if scores else {},
        kept_nominal=nominal,
        kept=_mean(one.kept for one in held),
        kept_per_layer=tuple(sum(layer) / len(layer) for layer in layers),
        nbytes=_mean(one.nbytes for one in held),
        nbytes_full=_mean(one.nbytes_full for one in held),
        peak_bytes=max((one.peak_bytes for one in held if one.peak_bytes), default=None),
        tokens=_mean(outcome.tokens for outcome in outcomes.values()),
        prefill_seconds=_mean(outcome.prefill_seconds for outcome in outcomes.values()),
        seconds_per_token=answering / tokens if tokens else None,
        answer_tokens=tokens / len(answers) if answers else None,
        prefill_operations=_mean(o.prefill_operations for o in outcomes.values()),
        step_operations=_mean(o.step_operations for o in outcomes.values()),
        truncation=task.truncation,
        truncated=sum(outcome.left_out > 0 for outcome in outcomes.values()),
        at_limit=sum(answer.ended == "limit" for answer in answers),
        failed=_counted(answer.failed[metric] for answer in answers if metric in answer.failed),
        errors=_counted(sample.error for sample in samples if sample.error is not None),
        commits=tuple(dict.fromkeys(sample.commit for sample in samples)),
        setups=distinct(sample.setup for sample in samples),
    )


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
        groups = grouped(
            (str(sample.metadata[name]), sample.outcome)
            for sample in samples
            if sample.metadata.get(name) is not None and sample.outcome is not None
        )
        if len(groups) > 1:
            found[name] = {value: estimate(members, metric) for value, members in groups.items()}
    outcomes = [sample.outcome for sample in samples if sample.outcome is not None]
    turns = max((len(outcome.answers) for outcome in outcomes), default=0)
    for turn in range(turns if turns > 1 else 0):
        answered = [o for o in outcomes if len(o.answers) > turn]
        alone = [o.model_copy(update={"answers": (o.answers[turn],)}) for o in answered]
        found.setdefault("turn", {})[str(turn + 1)] = estimate(alone, metric)
    return found


def flat(model: BaseModel | None, kind: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Fields of `model`, of type `kind`, with nested names joined by dots ("cell.subject.name").

    The keys depend on `kind` only; all values are None if `model` is. Dictionaries and tuples
    (`scores`, `by`, `errors`, …) become plain dicts and lists.
    """
    found: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        value = None if model is None else getattr(model, name)
        fields = _with_fields(field.annotation)
        if fields is not None:
            found |= flat(value, fields, f"{prefix}{name}.")
        elif model is not None and isinstance(value, dict | tuple):
            found[prefix + name] = model.model_dump(mode="json", include={name})[name]
        else:
            found[prefix + name] = value
    return found


def _with_fields(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model of an annotation `M` or `M | None`; None for any other annotation."""
    several = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    for kind in (annotation, *several):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def distinct(setups: Iterable[MachineSetup]) -> tuple[MachineSetup, ...]:
    """The setups that differ, in order."""
    found: list[MachineSetup] = []
    for setup in setups:
        if setup not in found:
            found.append(setup)
    return tuple(found)


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    return dict(Counter(reasons).most_common())
