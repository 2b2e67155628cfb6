# SPDX-License-Identifier: Apache-2.0
"""The picture of README's first screen: score against bytes, both protocols side by side.

Letters are sized for a width of 390 pixels, and the background is opaque, for dark pages. Methods
differ in colour, marker and dash.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from docs.generate.made import LETTERS, picture
from docs.generate.needle_rows import by_haystack, value
from kvfold.eval.run.cell import FULL
from kvfold.evidence.pictures import legend_below
from kvfold.report.board import Board
from kvfold.report.style import COLORS, GREY

FILE = "score-against-bytes.svg"
WIDTH, HEIGHT = 6.4, 5.4  # inches
TICKS = (0.05, 0.1, 0.2, 0.5, 1.0)


class Line(NamedTuple):
    """Name and style of a method in the picture."""

    name: str
    color: str
    marker: str
    dash: tuple[int, ...] = ()


# Methods of the picture, by their names in reports.
LINES = {
    "kvzip": Line("KVzip", COLORS[0], "o"),
    "zap": Line("zap", "#5f6b00", "h", (1, 1)),
    "pyramidkv": Line("PyramidKV", COLORS[1], "s", (6, 3)),
    "snapkv": Line("SnapKV", COLORS[2], "^", (2, 2)),
    "d2o": Line("D2O", COLORS[3], "D", (8, 3, 2, 3)),
    "h2o": Line("H2O", COLORS[5], "v", (12, 4)),
    "streaming_llm": Line("sinks + recent", GREY, "P", (3, 4)),
    "simlayerkv:window=128": Line("SimLayerKV", COLORS[4], "*"),
    "dbudgetkv": Line("DBudgetKV", COLORS[6], "X"),
    "compactor": Line("Compactor", COLORS[7], "p", (3, 2)),
}


def draw(boards: Sequence[Board], path: Path) -> None:
    """Writes the picture; equal records give an equal file."""
    with picture(path, WIDTH, HEIGHT) as drawn:
        _draw(drawn, boards)


def _draw(drawn: Figure, boards: Sequence[Board]) -> None:
    panels = drawn.subplots(1, 2, sharey=True)
    for panel, aware in zip(panels, (False, True), strict=True):
        when = "with the question\nin view" if aware else "before the question\nis known"
        panel.set_title(when, fontsize=LETTERS)
        _panel(panel, [one for one in boards if one.question_aware == aware])
    panels[0].set_ylabel("found, %")
    how = {"frameon": False, "fontsize": LETTERS, "handlelength": 2.4, "columnspacing": 1.0}
    legend_below(drawn, panels, ncols=3, **how)


def _panel(panel: Axes, boards: Sequence[Board]) -> None:
    """A line per method through its budgets, each with a bar that spans the haystacks' scores."""
    found = [row for board in boards for row in board.overall() if row.complete and row.score]
    each = [one for board in boards for one in by_haystack(board).items()]
    for row in found:
        if row.method == FULL:
            panel.axhline(value(row), color="black", linewidth=1.4, label="full cache")
    for method, line in LINES.items():
        own = [row for row in found if row.method == method and row.bytes_ratio]
        own.sort(key=lambda row: row.bytes_ratio or 0)
        if not own:
            continue
        x, y = [row.bytes_ratio or 0 for row in own], [value(row) for row in own]
        spans = [
            [one.score.value for at, one in each if at[:2] == (method, row.budget) and one.score]
            for row in own
        ]
        low, high = map(min, spans), map(max, spans)
        panel.vlines(x, [*low], [*high], color=line.color, linewidth=1.2, alpha=0.45)
        panel.plot(
            x, y, label=line.name, color=line.color, marker=line.marker, markersize=8,
            linewidth=2, linestyle=(0, line.dash) if line.dash else "-", clip_on=False,
        )  # fmt: skip
    if not found:
        panel.text(0.5, 0.5, "not run yet", ha="center", transform=panel.transAxes)
    panel.set_xscale("log")
    panel.set_xlim(0.045, 1.15)
    panel.set_ylim(0, 100)
    panel.set_xticks(TICKS, [f"{100 * tick:.0f}" for tick in TICKS])
    panel.set_xlabel("bytes, % of full")
    panel.xaxis.set_minor_locator(NullLocator())
    panel.tick_params(length=0)
    panel.grid(color="#e4e4e4", linewidth=0.8)
    panel.spines[:].set_visible(False)
