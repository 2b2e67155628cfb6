# SPDX-License-Identifier: Apache-2.0
"""What a fifth of the cache answers, in a bullet for each protocol: README's headline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import real_picture
from needle_rows import core, value

from kvfold.eval.run.cell import FULL
from kvfold.eval.run.cell_result import CellResult
from kvfold.methods.description import shortest
from kvfold.report.board import Board, boards
from kvfold.report.headline import FIFTH
from kvfold.report.style import BASELINES
from kvfold.report.summary import ReportRow

MODEL = "SmolLM2-135M-Instruct"
PERCENT = "\u00a0%"  # never on another line than its number


def summary(results: Sequence[CellResult]) -> str:
    """Answers from a fifth of the cache, for each protocol; empty without such records."""
    found = [claim for board in boards(core(results)) if (claim := Claim.of(board))]
    if not found:
        return ""
    best = [row for claim in found for row in claim.best]
    parts = sorted(100 * (row.bytes_ratio or 0) for row in best)
    low, high = f"{parts[0]:.0f}", f"{parts[-1]:.0f}"
    size = low if low == high else f"{low} to {high}"
    template = "; KVzip also keeps the chat template" if "kvzip" in [r.method for r in best] else ""
    return "\n".join([
        f"{MODEL} looks for a 7-digit number hidden in 1024 tokens, with a fifth of the cache's "
        f"entries ({size}{PERCENT} of its bytes{template}). An answer counts only with all digits:",
        "",
        *(f"- {claim}" for claim in found),
    ])  # fmt: skip


class Claim(NamedTuple):
    """The full cache, the picture's best methods at a fifth, and all that do worse, best first."""

    when: str
    full: ReportRow
    best: list[ReportRow]
    worse: list[ReportRow]

    @classmethod
    def of(cls, board: Board) -> Claim | None:
        """None without the full cache, or a method at a fifth."""
        every = [row for row in board.overall() if row.complete and row.score]
        full = next((row for row in every if row.method == FULL), None)
        fifth = [row for row in every if row.kept_nominal == FIFTH and row.method not in BASELINES]
        fifth.sort(key=lambda row: (-value(row), row.bytes_ratio or 0))
        drawn = [row for row in fifth if row.method in real_picture.LINES]
        if full is None or not drawn:
            return None
        best = [row for row in drawn if _percent(row) == _percent(drawn[0])]
        return cls(board.when, full, best, [row for row in fifth if value(row) < value(best[-1])])

    def __str__(self) -> str:
        names = and_list([_name(row) for row in self.best])
        verb = "find" if self.best[1:] else "finds"
        claims = [f"{names} {verb} **{_percent(self.best[0])}**"]
        if self.worse:
            other, samples = self.worse[0], self.best[0].samples
            count = f" ({other.samples} samples)" if other.samples != samples else ""
            claims.append(f"the next lower score is {_percent(other)}, of {_name(other)}{count}")
        claims.append(f"the full cache {_percent(self.full)}")
        when = self.when[0].upper() + self.when[1:]
        return f"**{when}**, {'; '.join(claims)} ({self.full.samples} samples)."


def and_list(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _percent(row: ReportRow) -> str:
    return f"{round(value(row), 1):g}{PERCENT}"


def _name(row: ReportRow) -> str:
    line = real_picture.LINES.get(row.method)
    fitted = " (after a fit)" if row.method == "zap" else ""
    return f"{line.name}{fitted}" if line else f"`{shortest(row.method)}`"
