# SPDX-License-Identifier: Apache-2.0
"""Rows of the published results that belong to a method."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from links import ROOT

from kvfold.eval.run.cell import FULL, TRUNCATED
from kvfold.methods.base import Composition, Method, parse
from kvfold.report.board import Board, boards, haystacks
from kvfold.report.load import load_results
from kvfold.report.summary import ReportRow
from kvfold.report.tables import COLUMNS, by_budget, cells

RESULTS = ROOT / "docs" / "results" / "bundled"
SHOWN = ("method", "budget", "score", "− full (95 %)", "place", "kept", "bytes")
READING = (
    "Rows of the [leaderboard](../results/bundled/README.md) of the bundled model, over all tasks. "
    "Score: percent, with its 95 % interval. − full: difference to the full cache on the same "
    "samples, ≈ if the interval holds zero. Place: ranks within a budget that the intervals allow. "
    "Kept: asked → measured. Bytes: over the full cache's."
)


def section(cls: type[Method]) -> str:
    """Tables of a method's rows, one for each protocol, and links to the other comparisons."""
    parts = []
    for board in _leaderboard():
        rows = by_budget(board.overall())
        own = [row for row in rows if cls in _classes(row.method)]
        if own:
            full = [row for row in rows if row.method == FULL and row not in own]
            hidden = f"Haystack: {haystacks(board.scored)}."
            parts += [f"### {board.protocol.capitalize()}", hidden, _table([*full, *own])]
    parts = [READING, *parts] if parts else ["The leaderboard has no row of this method."]
    others = [name for name in _comparisons() if cls in _compared(name)]
    if others:
        named = ", ".join(f"[{name}](../results/bundled/{name}/report.md)" for name in others)
        parts.append(f"Other comparisons: {named}.")
    return "\n\n".join(parts)


@cache
def _leaderboard() -> list[Board]:
    """Boards of the report, one for each protocol."""
    return boards(load_results([RESULTS / "records.jsonl"]))


@cache
def _comparisons() -> list[str]:
    """Folders of comparisons beside the leaderboard."""
    return sorted(path.parent.name for path in RESULTS.glob("*/records.jsonl"))


@cache
def _compared(name: str) -> frozenset[type[Method]]:
    """Method classes in one comparison."""
    texts = {result.cell.method for result in load_results([RESULTS / name / "records.jsonl"])}
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
    lines = [SHOWN, ("---", "---", *["---:"] * (len(SHOWN) - 2))]
    lines += [tuple(cells(row)[i] for i in picked) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
