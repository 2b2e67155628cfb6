# SPDX-License-Identifier: Apache-2.0
"""Rows of the published results that belong to a method."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path

from docs.generate.made import DOCS, RESULTS, table
from kvfold.eval.run.cell import FULL, TRUNCATED
from kvfold.loading import BUNDLED
from kvfold.methods.base import Composition, Method, parse
from kvfold.report.board import Board, boards, haystacks
from kvfold.report.load import load_results
from kvfold.report.page import page
from kvfold.report.summary import ReportRow
from kvfold.report.tables import COLUMNS, by_budget, cells
from kvfold.report.write import styles_of

BUNDLED_RESULTS = RESULTS / "bundled"
SHOWN = ("method", "budget", "score", "− full (95 %)", "place", "kept", "bytes")
READING = (
    "Rows of the leaderboards of [a really trained model](../results/README.md), where it has been "
    "run, and of the [bundled model](../results/bundled/README.md), over all tasks. "
    "Score: percent, with its 95 % interval. − full: difference to the full cache on the same "
    "samples, ≈ if the interval holds zero. Place: ranks within a budget that the intervals allow. "
    "Kept: asked → measured. Bytes: over the full cache's."
)


def section(cls: type[Method]) -> str:
    """Tables of a method's rows, for each model and protocol, and links to other comparisons."""
    parts = []
    for board, rows in _rows():
        own = [row for row in rows if cls in _classes(row.method)]
        if own:
            full = [row for row in rows if row.method == FULL and row not in own]
            hidden = f"Haystack: {haystacks(board.scored)}."
            model = "Bundled model" if board.subject.name == BUNDLED else board.subject.name
            parts += [f"### {model}, {board.protocol}", hidden, _table([*full, *own])]
    parts = [READING, *parts] if parts else ["The leaderboard has no row of this method."]
    others = [name for name in _comparisons() if cls in _compared(name)]
    if others:
        named = ", ".join(f"[{name}](../results/bundled/{name}/report.md)" for name in others)
        parts.append(f"Other comparisons: {named}.")
    return "\n\n".join(parts)


def to_sort() -> dict[str, str]:
    """Pages of all rows of a model, to sort and filter, by the folder of its records."""
    return {
        folder.relative_to(DOCS).as_posix(): page(every, styles_of(every))
        for folder, every in _leaderboards().items()
    }


@cache
def _leaderboards() -> dict[Path, list[Board]]:
    """Boards of both models by folder, one for each protocol, the really trained one first."""
    files = [folder / "records.jsonl" for folder in (RESULTS, BUNDLED_RESULTS)]
    return {file.parent: boards(load_results([file])) for file in files if file.is_file()}


@cache
def _rows() -> list[tuple[Board, list[ReportRow]]]:
    """Each board, and its rows over all tasks."""
    return [(board, by_budget(board.overall())) for board in chain(*_leaderboards().values())]


@cache
def _comparisons() -> list[str]:
    """Folders of comparisons beside the leaderboard."""
    return sorted(path.parent.name for path in BUNDLED_RESULTS.glob("*/records.jsonl"))


@cache
def _compared(name: str) -> frozenset[type[Method]]:
    """Method classes in one comparison."""
    results = load_results([BUNDLED_RESULTS / name / "records.jsonl"])
    texts = {result.cell.method for result in results}
    return frozenset(cls for text in texts for cls in _classes(text))


@cache
def _classes(text: str) -> frozenset[type[Method]]:
    """Classes of the methods in a record's text; none for a shorter context, which is no method."""
    if text == TRUNCATED:
        return frozenset()
    method = parse(text)
    return frozenset(map(type, method.parts if isinstance(method, Composition) else (method,)))


def _table(rows: Sequence[ReportRow]) -> str:
    picked = [COLUMNS.index(name) for name in SHOWN]
    return table(SHOWN, [[cells(row)[i] for i in picked] for row in rows], left=range(2))
