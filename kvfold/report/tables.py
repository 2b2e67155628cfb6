# SPDX-License-Identifier: Apache-2.0
"""Markdown tables and a CSV file of the records."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

from kvfold.eval.run.cell_result import CellResult, flat
from kvfold.evidence.estimates import Estimate
from kvfold.evidence.grouped import grouped
from kvfold.methods.description import shortest
from kvfold.report.board import Board, BoardView, titles
from kvfold.report.caveats import board_caveats
from kvfold.report.headline import headline, signed
from kvfold.report.summary import ReportRow, rows

COLUMNS = (
    "method", "budget", "score", "− full (95 %)", "place", "kept", "bytes", "operations", "length",
    "prefill", "samples", "errors / failed / cut",
)  # fmt: skip
READING = (
    "score: percent, with its 95 % interval; − full: difference to the full cache on the same "
    "samples, ≈ if the interval holds zero; place: ranks within a budget that the intervals allow; "
    "kept: asked → measured; bytes, prefill: over the full cache's; cut: truncated prompts"
)
COUNTED = "operations: of a prefill with its compression / of a decode step, over the full cache's"
LENGTH = "length: of answers in tokens, over the full cache's"
_ESCAPED = str.maketrans(
    {mark: f"\\{mark}" for mark in "\\`*|[]"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
)


def markdown(boards: Sequence[Board]) -> str:
    """The report's text: headline, tables of all tasks and each group, perplexity, caveats."""
    parts = ["# Results"]
    for board, title in zip(boards, titles(boards), strict=True):
        subject = board.subject
        parts.append(f"## {_safe(title)}")
        overall = board.overall()
        also = [COUNTED] if counts_operations(overall) else []
        also += [LENGTH] if tells_lengths(overall) else []
        reading = "; ".join([READING, *also])
        about = map(_safe, (subject.name, subject.dtype, subject.attention))
        parts.append(f"{', '.join(about)}; {reading}.")
        if overall:
            said = headline(overall, board.when)
            parts.append(_safe(" ".join([said.claim, said.evidence, *said.further])))
        for view in (v for v in board.views() if v.length is None and v.kind != "task"):
            parts += _view(view)
        for text, results in board.texts.items():
            parts += [f"### Perplexity of {_safe(text)}, lower is better"]
            parts.append(_table(rows(results), lower=True))
        caveats = board_caveats(board)
        parts += ["### Caveats"] if caveats else []
        for caveat in caveats:
            lines = "\n".join(f"- {_safe(line)}" for line in caveat.lines)
            parts.append(f"{_safe(caveat.about)}:\n\n{lines}")
    return "\n\n".join(parts) + "\n"


def by_task(boards: Sequence[Board]) -> str:
    """One table per task, over all its lengths."""
    parts = ["# Results by task"]
    for board, title in zip(boards, titles(boards), strict=True):
        parts.append(f"## {_safe(title)}")
        for view in (v for v in board.views() if v.length is None and v.kind == "task"):
            parts += _view(view)
    return "\n\n".join(parts) + "\n"


def _view(view: BoardView) -> list[str]:
    """Heading, haystacks and table of a view."""
    where = [f"Haystack: {_safe(view.haystack)}."] if view.haystack else []
    return [f"### {_safe(view.name)}", *where, _table(view.rows)]


def to_csv(results: Sequence[CellResult]) -> str:
    """One line per record, one column per field.

    Nested fields are flattened ("cell.subject.name"). Dictionaries and lists (`scores`, `by`,
    `errors`, …) are JSON. An empty cell is None.
    """
    out = io.StringIO()
    lines = [
        {name: _text(value) for name, value in flat(result, CellResult).items()}
        for result in results
    ]
    writer = csv.DictWriter(out, list(lines[0]))
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _text(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def _table(shown: Sequence[ReportRow], lower: bool = False) -> str:
    lines = [COLUMNS, ("---", "---", *["---:"] * (len(COLUMNS) - 2))]
    lines += map(cells, by_budget(shown, lower))
    left_out = ["prefill" if counts_operations(shown) else "operations"]
    left_out += [] if tells_lengths(shown) and not lower else ["length"]
    kept = [i for i, name in enumerate(COLUMNS) if name not in left_out]
    return "\n".join(f"| {' | '.join(line[i] for i in kept)} |" for line in lines)


def counts_operations(shown: Sequence[ReportRow]) -> bool:
    """True if records tell operations, which then stand in place of one machine's seconds."""
    return any(row.prefill_operations is not None for row in shown)


def tells_lengths(shown: Sequence[ReportRow]) -> bool:
    """True if records tell how long answers are."""
    return any(row.length is not None for row in shown)


def by_budget(shown: Sequence[ReportRow], lower: bool = False) -> list[ReportRow]:
    """Rows without a budget, then by budget from the largest cache on; best score first.

    Rows that lack tasks come after the others of their budget: their means are over other tasks.
    """
    sizes = grouped((row.budget, row.kept_nominal or row.bytes_ratio or 0.0) for row in shown)
    order = sorted(sizes, key=lambda b: (b is not None, -sum(sizes[b]) / len(sizes[b])))

    def rank(row: ReportRow) -> tuple[int, bool, float]:
        worst = math.inf if row.score is None else row.score.value if lower else -row.score.value
        return order.index(row.budget), not row.complete, worst

    return sorted(shown, key=rank)


def cells(row: ReportRow) -> tuple[str, ...]:
    """Texts of a row's columns, as in `COLUMNS`."""
    return (
        _safe(shortest(row.method)) + ("" if row.complete else f" ({row.units} of {row.expected})"),
        _safe(row.budget) if row.budget else "–",
        "–" if row.score is None else scored(row.score),
        _gap(row),
        "–" if row.place is None else "–".join(dict.fromkeys(map(str, row.place))),
        "–" if row.kept is None else _kept(row),
        "–" if row.bytes_ratio is None else f"{row.bytes_ratio:.1%}",
        f"{_times(row.prefill_operations)} / {_times(row.step_operations)}",
        _times(row.length),
        _times(row.prefill),
        f"{row.samples:,}",
        f"{row.errors} / {row.failed} / {row.truncated}",
    )


def _times(ratio: float | None) -> str:
    """A ratio to the full cache as text."""
    return "–" if ratio is None else f"{ratio:.2f}×"


def scored(score: Estimate) -> str:
    """A mean as text, with its interval if known."""
    if score.low is None or score.high is None:
        return f"{score.value:.1f}"
    return f"{score.value:.1f} ({score.low:.1f} to {score.high:.1f})"


def _gap(row: ReportRow) -> str:
    if row.gap is None:
        return "–"
    mark = "≈ " if row.gap.is_noise else ""
    return f"{mark}{signed(row.gap.value)} ({signed(row.gap.low)} to {signed(row.gap.high)})"


def _kept(row: ReportRow) -> str:
    measured = f"{row.kept:.3f}"
    return measured if row.kept_nominal is None else f"{row.kept_nominal:g} → {measured}"


def _safe(text: str) -> str:
    """A user-given name with Markdown and HTML escaped, on one line."""
    return " ".join(text.translate(_ESCAPED).split())
