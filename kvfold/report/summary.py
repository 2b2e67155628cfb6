# SPDX-License-Identifier: Apache-2.0
"""Means over tasks with confidence intervals, as pure functions on records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvfold.eval.run.cell import FULL, EvalCell
from kvfold.eval.run.cell_result import CellResult
from kvfold.evidence.estimates import Estimate, IntervalEstimate, PairedDifference, percent, shares
from kvfold.evidence.intervals import Interval, combined, paired, pooled_pairs, pooled_scores


@dataclass(frozen=True)
class ReportRow:
    """One method at one budget, over `units` of the `expected` (task, length) pairs.

    `gap` is the difference to the full cache on the same samples, in points.
    `score` is in percent, or a perplexity. `kept_nominal` is the ratio asked for, `kept` (entries
    stored over entries seen) and `bytes_ratio` (over the full cache's) are means over units.
    `prefill` is prefill plus compression time over the full cache's; None if they ran on different
    machines. `prefill_operations`, `step_operations` and `length` (of answers, in tokens) are over
    the full cache's, None where a record lacks them. `place` is the best and worst rank among
    methods of this budget that are consistent with the 95 % intervals.
    """

    method: str
    budget: str | None
    units: int
    expected: int
    score: Estimate | None
    gap: IntervalEstimate | None
    kept_nominal: float | None
    kept: float | None
    bytes_ratio: float | None
    prefill: float | None
    prefill_operations: float | None
    step_operations: float | None
    length: float | None
    samples: int
    truncated: int
    failed: int
    errors: int
    place: tuple[int, int] | None = None

    @property
    def complete(self) -> bool:
        """True if the row covers all tasks and lengths."""
        return self.units == self.expected


def rows(results: Sequence[CellResult]) -> list[ReportRow]:
    """One row per method and budget, in order of the records.

    `results` are of one model and protocol, all scores or all perplexities. Means weigh tasks
    equally, and lengths equally within a task; tasks count as independent.
    """
    full = {result.cell: result for result in results if result.cell.method == FULL}
    expected = len({result.cell.reference for result in results})
    subjects = dict.fromkeys((result.cell.method, result.cell.budget) for result in results)
    made = [
        _row([r for r in results if (r.cell.method, r.cell.budget) == subject], full, expected)
        for subject in subjects
    ]
    lower = any(result.lower_is_better for result in results)
    return [replace(row, place=_place(row, made, lower)) for row in made]


def mean(results: Sequence[CellResult]) -> Estimate | None:
    """Mean over tasks, and over lengths within a task; None without scores.

    It has an interval only if every result has one.
    """
    scored = [result for result in results if result.score is not None]
    scores = [result.score for result in scored if result.score is not None]
    weights = _weights(scored)
    if not scored:
        return None
    if any(score.error is None for score in scores):
        value = sum(weight * score.value for weight, score in zip(weights, scores, strict=True))
        count = sum(score.count for score in scores)
        return Estimate(value=value, error=None, low=None, high=None, count=count)
    if not any(result.lower_is_better for result in scored):
        return percent(pooled_scores([shares(score) for score in scores], weights))
    return _mean_perplexity(scores, weights)


def _mean_perplexity(scores: Sequence[Estimate], weights: list[float]) -> Estimate:
    value, low, high = map(float, combined([_interval(score) for score in scores], weights))
    error = math.hypot(*(w * (score.error or 0) for w, score in zip(weights, scores, strict=True)))
    count = sum(score.count for score in scores)
    return Estimate(value=value, error=error, low=low, high=high, count=count)


def gap(results: Sequence[CellResult]) -> IntervalEstimate | None:
    """Mean difference to the full cache; None unless every result has one, of two samples or more.

    Gains and losses are pooled over tasks, so eight tasks of 20 samples give an interval like one
    task of 160. Intervals of perplexities combine as those of independent estimates.
    """
    known = [r.difference for r in results if r.difference is not None and r.difference.samples > 1]
    if not known or len(known) < len(results):
        return None
    weights = _weights(results)
    pairs = [one.pair for one in known]
    both = [one for one in pairs if one is not None]
    if len(both) < len(pairs):
        return IntervalEstimate(*map(float, combined([_interval(one) for one in known], weights)))
    return IntervalEstimate(*(100 * float(each) for each in paired(pooled_pairs(both, weights))))


def _interval(of: Estimate | PairedDifference) -> Interval:
    return Interval(*(np.array(each, np.float64) for each in (of.value, of.low, of.high)))


def clearly_better(one: Estimate, other: Estimate, lower: bool) -> bool:
    """True if `one` is better than `other` at 95 % confidence; `lower` means lower is better.

    The two are treated as independent. They share samples, so the test is conservative.
    """
    if lower:
        one, other = other, one
    if one.low is None or other.high is None:
        return False
    ahead = one.value - other.value
    return ahead > math.hypot(one.value - one.low, other.high - other.value)


def frontier(points: Sequence[tuple[float, float]], lower: bool = False) -> list[int]:
    """Pareto frontier: indices of (bytes, score) points not dominated, by ascending bytes."""
    sign = -1 if lower else 1
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -sign * points[i][1]))
    best, found = -math.inf, list[int]()
    for index in order:
        if sign * points[index][1] > best:
            best = sign * points[index][1]
            found.append(index)
    return found


def budgets(results: Iterable[CellResult]) -> list[str]:
    """All budgets, the largest cache first."""
    kept: dict[str, list[float]] = {}
    for result in results:
        if result.cell.budget is not None:
            known = kept.setdefault(result.cell.budget, [])
            asked = result.kept if result.kept_nominal is None else result.kept_nominal
            known += [] if asked is None else [asked]
    return sorted(kept, key=lambda budget: -sum(kept[budget]) / max(len(kept[budget]), 1))


def _row(
    members: Sequence[CellResult], full: dict[EvalCell, CellResult], expected: int
) -> ReportRow:
    """The row of one method and budget, not yet ranked."""
    scored = [result for result in members if result.score is not None]
    pairs = [(result, full.get(result.cell.reference)) for result in scored]
    return ReportRow(
        method=members[0].cell.method,
        budget=members[0].cell.budget,
        units=len(scored),
        expected=expected,
        score=mean(scored),
        gap=gap(scored),
        kept_nominal=members[0].kept_nominal,
        kept=_average(result.kept for result in scored),
        bytes_ratio=_average(result.bytes_ratio for result in scored),
        prefill=_prefill(pairs),
        prefill_operations=_over_full(pairs, lambda result: result.prefill_operations),
        step_operations=_over_full(pairs, lambda result: result.step_operations),
        length=_over_full(pairs, lambda result: result.answer_tokens),
        samples=sum(result.samples for result in members),
        truncated=sum(result.truncated for result in members),
        failed=sum(sum(result.failed.values()) for result in members),
        errors=sum(sum(result.errors.values()) for result in members),
    )


def _place(row: ReportRow, others: Sequence[ReportRow], lower: bool) -> tuple[int, int] | None:
    """Best and worst rank of a row among complete rows of its budget; None if not ranked."""
    if not _ranked(row) or row.score is None:
        return None
    scores = [o.score for o in others if o.budget == row.budget and _ranked(o) and o.score]
    ahead = sum(clearly_better(score, row.score, lower) for score in scores)
    behind = sum(clearly_better(row.score, score, lower) for score in scores)
    return 1 + ahead, len(scores) - behind


def _ranked(row: ReportRow) -> bool:
    known = row.score is not None and row.score.low is not None
    return known and row.complete and row.budget is not None


def _weights(results: Sequence[CellResult]) -> list[float]:
    """Weights that sum to 1: equal per task, and equal per length within a task."""
    count = Counter(result.cell.task for result in results)
    return [1 / (len(count) * count[result.cell.task]) for result in results]


Pairs = Sequence[tuple[CellResult, CellResult | None]]


def _over_full(pairs: Pairs, of: Callable[[CellResult], float | None]) -> float | None:
    """Sum of a figure over the full cache's; None if a record lacks it."""
    ours = [of(result) for result, _ in pairs]
    theirs = [None if full is None else of(full) for _, full in pairs]
    known = [value for value in (*ours, *theirs) if value is not None]
    if not pairs or len(known) < 2 * len(pairs):
        return None
    whole = sum(value for value in theirs if value is not None)
    return sum(value for value in ours if value is not None) / whole if whole else None


def _prefill(pairs: Pairs) -> float | None:
    """Prefill seconds over the full cache's; None unless one setup measured both."""
    ours = theirs = 0.0
    for result, full in pairs:
        if full is None or not full.prefill_seconds or result.prefill_seconds is None:
            return None
        if any(setup != full.setups[0] for setup in (*result.setups, *full.setups)):
            return None
        ours, theirs = ours + result.prefill_seconds, theirs + full.prefill_seconds
    return ours / theirs if theirs else None


def _average(values: Iterable[float | None]) -> float | None:
    """Mean of the values; None if there are none, or one is None."""
    known = list(values)
    numbers = [value for value in known if value is not None]
    return sum(numbers) / len(numbers) if numbers and len(numbers) == len(known) else None
