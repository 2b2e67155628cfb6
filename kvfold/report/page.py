# SPDX-License-Identifier: Apache-2.0
"""The HTML page of a report: one file with data, styles and scripts, no network access."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvfold.eval.run.cell import FULL
from kvfold.eval.run.cell_result import CellResult
from kvfold.evidence import page as evidence
from kvfold.evidence.grouped import grouped
from kvfold.report.board import Board, titles
from kvfold.report.caveats import board_caveats, near_guessing
from kvfold.report.headline import headline
from kvfold.report.pictures import by_depth
from kvfold.report.style import BASELINES, LineStyle, label
from kvfold.report.summary import ReportRow, budgets, frontier, rows

SCRIPTS = ("base.js", "controls.js", "chart.js", "tables.js", "needles.js", "page.js")
FIELDS = (
    "method", "budget", "score", "least", "most", "gap", "low", "high", "first", "last", "nominal",
    "kept", "bytes", "prefill", "prefillOperations", "stepOperations", "length", "samples", "units",
    "expected", "truncated", "failed", "errors", "edge",
)  # fmt: skip


def page(boards: Sequence[Board], styles: dict[str, LineStyle]) -> str:
    """The HTML of a report; user-given names are embedded as data and shown as text only."""
    subjects = list(dict.fromkeys(board.subject.name for board in boards))
    title = f"KV cache compression on {', '.join(subjects)}: kvfold report"
    claims = " ".join(headline(one.overall(), one.when).claim for one in boards)
    return evidence.page("report", title, claims, scripts=SCRIPTS, data=payload(boards, styles))


def payload(boards: Sequence[Board], styles: dict[str, LineStyle]) -> dict[str, Any]:
    """The page's data as plain JSON values; rows are lists with the columns `FIELDS`."""
    order = list(styles)
    return {
        "fields": FIELDS,
        "methods": [
            {"name": name, "label": label(name),
             "baseline": name in BASELINES, "full": name == FULL, **style._asdict()}
            for name, style in styles.items()
        ],
        "boards": [
            _board(board, title, order)
            for board, title in zip(boards, titles(boards), strict=True)
        ],
    }  # fmt: skip


def _board(board: Board, title: str, order: list[str]) -> dict[str, Any]:
    """The page's data of one board."""
    claim = headline(board.overall(), board.when)
    weak = sorted({r.cell.task for r in board.scored if r.cell.method == FULL and near_guessing(r)})
    caution = [
        "These means hold tasks on which the full cache itself is near guessing: "
        f"{len(weak)} of {sum(map(len, board.groups.values()))}."
    ]
    return {
        "title": title,
        "claim": _unbroken(claim.claim),
        "evidence": _unbroken(
            " ".join([claim.evidence, *claim.further, *(caution if weak else [])])
        ),
        "budgets": budgets(board.results),
        "lengths": board.lengths(board.scored),
        "groups": board.groups,
        "weak": weak,
        "views": [view._asdict() | {"rows": _rows(view.rows, order)} for view in board.views()],
        "texts": [
            {"name": name, "rows": _rows(rows(own), order, lower=True)}
            for name, own in board.texts.items()
        ],
        "needles": _needles(board.scored, order),
        "caveats": [caveat._asdict() for caveat in board_caveats(board)],
        "facts": _facts(board),
    }


def _unbroken(text: str) -> str:
    """Text that never breaks a line between a number and its percent sign."""
    return text.replace(" %", "\u00a0%")


def _rows(shown: Sequence[ReportRow], order: list[str], lower: bool = False) -> list[list[Any]]:
    points = [r for r in shown if r.complete and r.bytes_ratio is not None and r.score]
    edge = frontier([(r.bytes_ratio or 0, r.score.value) for r in points if r.score], lower)
    best = {id(points[index]) for index in edge}
    return [[_short(value) for value in _row(row, order, id(row) in best)] for row in shown]


def _row(row: ReportRow, order: list[str], edge: bool) -> list[Any]:
    """One row with the columns `FIELDS`."""
    known = row.score
    score = (known.value, known.low, known.high) if known else (None, None, None)
    gap = (row.gap.value, row.gap.low, row.gap.high) if row.gap else (None, None, None)
    return [
        order.index(row.method), row.budget, *score, *gap, *(row.place or (None, None)),
        row.kept_nominal, row.kept, row.bytes_ratio, row.prefill, row.prefill_operations,
        row.step_operations, row.length, row.samples, row.units, row.expected,
        row.truncated, row.failed, row.errors, int(edge),
    ]  # fmt: skip


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _needles(results: Sequence[CellResult], order: list[str]) -> list[dict[str, Any]]:
    """Heatmaps per task, method and budget: scores `[depth][length]`."""
    found = grouped(
        ((result.cell.task, result.cell.method, result.cell.budget), result)
        for result in results
        if "depth" in result.by
    )
    maps = []
    for (task, method, budget), own in found.items():
        lengths, depths, values = by_depth(own)
        maps.append({
            "task": task, "method": order.index(method), "budget": budget, "lengths": lengths,
            "depths": depths, "values": [[_short(v) for v in line] for line in values],
        })  # fmt: skip
    return maps


def _facts(board: Board) -> list[tuple[str, list[str]]]:
    """Conditions of the run as (name, values) pairs: model, protocol, data, machine, versions."""
    subject, results = board.subject, board.results
    setups = [setup for result in results for setup in result.setups]
    machines = [f"{s.gpu or s.cpu}, {s.cores} cores, {s.threads} threads" for s in setups]
    versions = [
        ", ".join([f"python {s.python}", *(f"{name} {v}" for name, v in s.versions.items())])
        for s in setups
    ]
    ruled = [(r.truncation, r.cell.task) for r in results if r.truncation != "none"]
    rules = [
        f"{rule}: {', '.join(dict.fromkeys(task for other, task in ruled if other == rule))}"
        for rule, _ in ruled
    ]
    facts = [
        ("Model", [f"{subject.name}, {subject.dtype}, attention {subject.attention}"]),
        ("Weights", [f"{subject.weights}, configuration {subject.config}"]),
        ("Vocabulary", [subject.vocabulary]),
        ("Protocol", [
            "the context and each question are compressed together" if board.question_aware else
            "the context is compressed before any question is known",
            "later turns see the model’s own answers" if board.history == "own" else
            "later turns see the right answers",
        ]),
        ("Compression acts on", [{"prefill": "the prompt’s cache", "decode": "the cache while the "
         "answer is written", "stream": "every token of a text"}.get(r.phase, r.phase)
         for r in results]),
        ("Longest prompt", [f"{r.cell.protocol.max_length:,} tokens" for r in results]),
        ("Cut prompts by rule", rules),
        ("Seed", [str(r.cell.seed) for r in results]),
        ("Fitted files", [f"{r.cell.method}: {', '.join(r.cell.files)}" for r in results
         if r.cell.files]),
        ("Data", [name for r in results for name in r.cell.data]),
        ("Machine", machines),
        ("Versions", versions),
        ("Commit", [str(commit) for r in results for commit in r.commits]),
    ]  # fmt: skip
    return [(name, list(dict.fromkeys(values))) for name, values in facts if values]
