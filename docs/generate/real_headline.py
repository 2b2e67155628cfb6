# SPDX-License-Identifier: Apache-2.0
"""What a fifth of the cache answers, in a bullet for each protocol: README's headline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from docs.generate import match_page, real_picture
from docs.generate.made import and_list
from docs.generate.needle_rows import core, value
from kvfold.eval.run.cell import FULL
from kvfold.eval.run.cell_result import CellResult
from kvfold.methods.base import Method, parse, parts_of
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
    """The full cache, the picture's best methods at a fifth, and the best of another choice."""

    when: str
    full: ReportRow
    best: list[ReportRow]
    other: ReportRow | None

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
        kin = {_first_part(row) for row in best}
        others = (row for row in fifth if _first_part(row) not in kin)
        return cls(board.when, full, best, next(others, None))

    def __str__(self) -> str:
        names = and_list([_name(row) for row in self.best])
        verb = "find" if self.best[1:] else "finds"
        claims = [f"{names} {verb} **{_percent(self.best[0])}**"]
        if self.other:
            samples = self.other.samples
            count = f" ({samples} samples)" if samples != self.best[0].samples else ""
            found = f"{_name(self.other)}, {_percent(self.other)}{count}"
            claims.append(f"the best other method, {found}")
        claims.append(f"the full cache {_percent(self.full)}")
        when = self.when[0].upper() + self.when[1:]
        return f"**{when}**, {'; '.join(claims)} ({self.full.samples} samples)."


def harder(docs: str) -> str:
    """What the headline's task is too easy to show; `docs` is the path to that folder."""
    own = [row for row in match_page.load() if row.method == match_page.BASE and row.kept == FIFTH]
    same, asked = sum(row.right for row in own), sum(row.asked for row in own)
    novels = len({row.text for row in own})
    return (
        "That is one number in a text. With three numbers in each passage of "
        f"{novels} novels, KVzip at a fifth gives the full cache's answer to {same} of {asked} "
        f"questions ([how small a cache can get]({docs}how-far-down.md)). KVzip takes about twice "
        "the operations until the first token ([which method for which "
        f"job]({docs}which-method.md)). [`kvfold check`]({docs}check.md) measures your own model "
        "and prompts."
    )


def _percent(row: ReportRow) -> str:
    return f"{round(value(row), 1):g}{PERCENT}"


def _name(row: ReportRow) -> str:
    line = real_picture.LINES.get(row.method)
    fits = any(hasattr(part, "file") for part in parts_of(parse(row.method)))
    name = line.name if line else f"`{shortest(row.method)}`"
    return f"{name} (after a fit)" if fits else name


def _first_part(row: ReportRow) -> type[Method]:
    """The method that chooses the entries, which presets and compositions share."""
    return type(parts_of(parse(row.method))[0])
