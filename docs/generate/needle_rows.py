# SPDX-License-Identifier: Apache-2.0
"""Tables of the needles that all methods are run on, with the score in each haystack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from docs.generate import made, paired
from kvfold.eval.run.cell_result import CellResult
from kvfold.evidence.estimates import IntervalEstimate
from kvfold.methods.description import shortest
from kvfold.report.board import Board
from kvfold.report.summary import ReportRow

# Haystacks by task and length: their means are ranked, and drawn.
CORE = {("ruler_niah_single_1", 1024): "noise", ("ruler_niah_single_2", 1024): "novel"}
NONE = "–"
Column = Callable[[ReportRow], str]


def is_core(result: CellResult) -> bool:
    """True for a needle that every method is run on."""
    return (result.cell.task, result.cell.length) in CORE


def core(results: Sequence[CellResult]) -> list[CellResult]:
    """Records that means are made of: of the needles that every method is run on, and losses."""
    return [one for one in results if one.lower_is_better or is_core(one)]


Found = Mapping[tuple[str, str | None, str], CellResult]


def by_haystack(board: Board) -> Found:
    """A board's records by method, budget and haystack."""
    return {
        (one.cell.method, one.cell.budget, name): one
        for (task, length), name in CORE.items()
        for one in board.scored
        if (one.cell.task, one.cell.length) == (task, length) and one.score
    }


def haystack_columns(board: Board) -> dict[str, Column]:
    """Columns with the score in each haystack, and their mean."""
    found = by_haystack(board)

    def score(name: str) -> Column:
        return lambda row: mean(found.get((row.method, row.budget, name)))

    names = dict.fromkeys(name for _, _, name in found)
    return {name: score(name) for name in names} | {"mean": mean}


def samples_column(board: Board) -> Column:
    """The numbers of samples in each haystack, such as "40 + 20"."""
    found = by_haystack(board)
    names = dict.fromkeys(name for _, _, name in found)

    def counts(row: ReportRow) -> str:
        own = [found.get((row.method, row.budget, name)) for name in names]
        return " + ".join(f"{one.samples}" for one in own if one)

    return counts


def name(row: ReportRow) -> str:
    """The shortest name of a row's method."""
    return shortest(row.method)


def value(row: ReportRow | CellResult) -> float:
    """The mean score of a row, or of a result."""
    assert row.score
    return row.score.value


def mean(row: ReportRow | CellResult | None) -> str:
    return f"{row.score.value:.1f}" if row and row.score else NONE


def kept(row: ReportRow) -> str:
    return NONE if row.kept is None else f"{row.kept:.3f}"


def nbytes(row: ReportRow) -> str:
    return NONE if row.bytes_ratio is None else f"{row.bytes_ratio:.1%}"


def gap(difference: IntervalEstimate | None) -> str:
    """A difference as text; ≈ if its interval holds zero."""
    if difference is None:
        return NONE
    return f"{'≈ ' if difference.is_noise else ''}{paired.written(difference)}"


def _times(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}×"


COSTS: dict[str, Column] = {
    "bytes": nbytes,
    "prefill": lambda row: _times(row.prefill_operations),
    "per token": lambda row: _times(row.step_operations),
}


def table(shown: Sequence[ReportRow], columns: Mapping[str, Column]) -> str:
    """A Markdown table of these columns; numbers are to the right."""
    named = sum(title in ("method", "budget") for title in columns)
    rows = [[cell(row) for cell in columns.values()] for row in shown]
    return made.table([*columns], rows, range(named))
