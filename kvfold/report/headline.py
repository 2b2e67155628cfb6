# SPDX-License-Identifier: Apache-2.0
"""Headline of a board: what the best method keeps at a fifth of the cache, and the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvfold.eval.run.cell import FULL
from kvfold.methods.description import shortest
from kvfold.report.style import BASELINES
from kvfold.report.summary import ReportRow

# The kept part that headlines speak of.
FIFTH = 0.2
# Losses in points that headlines are made for, smallest first.
MARGINS = (2, 5, 10)
# Characters after which a method's name is cut off.
LONGEST = 60


class Headline(NamedTuple):
    """A claim, its evidence, and (`further`) the smallest caches that certainly lose little."""

    claim: str
    evidence: str
    further: tuple[str, ...] = ()


def headline(rows: Sequence[ReportRow], when: str) -> Headline:
    """The part of the full cache's score that the best method keeps at a fifth of the cache.

    Without such a budget, the smallest cache whose loss is within a margin of `MARGINS` with 95 %
    confidence; without one, the method nearest to the full cache. `when` says whether methods know
    the question, such as "before the question is known". Only rows over all tasks are considered.
    """
    full = next((row for row in rows if row.method == FULL), None)
    known = [
        row
        for row in rows
        if row.method not in BASELINES and row.complete
        if row.gap and row.bytes_ratio and row.score
    ]
    if not any(row.score for row in rows):
        return Headline(
            "No scores to average.", "Perplexities and transcripts are not averaged; see below."
        )
    if full is not None and full.score is not None and not known:
        return Headline("No method to compare.", "None was run on every task of the full cache.")
    if full is None or full.score is None:
        return Headline(
            "Nothing to compare with.",
            "There are no records of the full cache on the same samples.",
        )
    fifth = [row for row in known if row.kept_nominal == FIFTH and _full_score(row) > 0]
    if fifth:
        return _at_a_fifth(fifth, known, when)
    return _smallest(known, when)


def _at_a_fifth(fifth: Sequence[ReportRow], known: Sequence[ReportRow], when: str) -> Headline:
    # By the paired difference: samples that failed would change a row's own mean.
    best = max(fifth, key=_gap)
    share = min(round(100 * _score(best) / _full_score(best)), 99)
    kept = f"{share} % of the full score" if _gap(best) < 0 else "the full score"
    claim = f"At a fifth of the cache, {_cut(best.method)} keeps {kept} {when}."
    alike = [_cut(row.method) for row in fifth if row.place and row.place[0] == 1 and row != best]
    few = 0 < len(alike) < 4
    same = [f"Not told apart from {_cut(best.method)}: {', '.join(alike)}."] if few else []
    safe = [
        f"Of {len(known)} caches, the smallest that loses at most {margin} points, each with 95 % "
        f"confidence, is {_name(row)}: {_percent(row)} of the bytes."
        for margin, row in _safe(known)
    ]
    return Headline(claim, _evidence(best), (*same, *safe))


def _smallest(known: Sequence[ReportRow], when: str) -> Headline:
    if safe := _safe(known):
        (margin, best), *others = safe
        claim = (
            f"{_name(best)} holds {_percent(best)} of the full cache’s bytes "
            f"and loses at most {margin} points {when}."
        )
        further = [
            f"For at most {points} points, {_name(row)} holds {_percent(row)}."
            for points, row in others
        ]
        return Headline(claim, _evidence(best), tuple(further))
    best = min(known, key=_loss)
    if any(row.gap and row.gap.is_noise for row in known):
        claim = "Too few samples to tell what is lost."
    else:
        claim = f"No method is certain to stay within {MARGINS[-1]} points of the full cache."
    nearest = f"Nearest is {_name(best)}, with {_percent(best)} of the bytes."
    return Headline(claim, f"{nearest} {_evidence(best)}")


def _safe(known: Sequence[ReportRow]) -> list[tuple[int, ReportRow]]:
    """Margins of `MARGINS`, each with the smallest cache whose loss is certainly within it."""
    smallest: dict[str, tuple[int, ReportRow]] = {}
    for margin in MARGINS:
        safe = [row for row in known if _loss(row) <= margin]
        if safe:
            best = min(safe, key=lambda row: row.bytes_ratio or 0)
            smallest.setdefault(_name(best), (margin, best))
    return list(smallest.values())


def _score(row: ReportRow) -> float:
    assert row.score
    return row.score.value


def _gap(row: ReportRow) -> float:
    assert row.gap
    return row.gap.value


def _full_score(row: ReportRow) -> float:
    """The full cache's score on the samples that the row has."""
    return _score(row) - _gap(row)


def _loss(row: ReportRow) -> float:
    """Upper bound of the points lost, at 95 % confidence."""
    assert row.gap
    return -row.gap.low


def _name(row: ReportRow) -> str:
    name = _cut(row.method)
    return name if row.budget is None else f"{name} at {row.budget}"


def _cut(name: str) -> str:
    name = shortest(name)
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _percent(row: ReportRow) -> str:
    share = 100 * (row.bytes_ratio or 0)
    return f"{share:.0f} %" if share >= 10 else f"{share:.1f} %"


def _evidence(row: ReportRow) -> str:
    assert row.score and row.gap
    tasks = "one task" if row.units == 1 else f"{row.units} tasks and lengths"
    return (
        f"It scores {row.score.value:.1f} where the full cache scores {_full_score(row):.1f}: a "
        f"difference of {signed(row.gap.value)} points, 95 % interval {signed(row.gap.low)} to "
        f"{signed(row.gap.high)}, over {row.samples:,} samples of {tasks}."
    )


def signed(value: float, digits: int = 1) -> str:
    """A number as text with + or − (U+2212); without a sign if it rounds to zero."""
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        return text.lstrip("-")
    return f"+{text}" if value > 0 else text.replace("-", "−")
