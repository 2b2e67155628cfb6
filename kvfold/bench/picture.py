# SPDX-License-Identifier: Apache-2.0
"""Figure of a run: time, bytes and peak as multiples of the full cache's, with quartiles."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvfold.bench.participants import AGAIN
from kvfold.bench.record import BenchCell
from kvfold.bench.summary import BenchRow
from kvfold.evidence.pictures import bare, legend_below, plain

PANELS = {
    "first_token": "time to first token",
    "per_token": "time per token",
    "nbytes": "cache bytes",
    "peak": "peak memory of prefill",
}
COLORS = ("#1f4e8c", "#d1495b", "#2e8b57", "#b8860b", "#6a4c93", "#4a4a4a")


def figure(rows: Sequence[BenchRow]) -> Figure:
    """One panel per quantity: x = multiple of the full cache, y = method, one colour per cell.

    Dots are medians over rounds, lines the quartiles. The grey band is the full cache's second
    participant against its first: the noise of the run.
    """
    cells = list(dict.fromkeys(row.cell for row in rows))
    methods = list(dict.fromkeys(str(row.label) for row in rows if row.label.method != AGAIN))
    height = 1.6 + 0.24 * len(methods) * max(1, 0.6 * len(cells))
    drawn = Figure(figsize=(13, height), dpi=130, layout="constrained")
    panels = drawn.subplots(1, len(PANELS), sharey=True, squeeze=False)[0]
    for panel, (name, title) in zip(panels, PANELS.items(), strict=True):
        _draw(panel, name, rows, cells, methods)
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xlabel("× full cache", fontsize=9)
    panels[0].set_yticks(range(len(methods)), [plain(name) for name in methods], fontsize=8)
    panels[0].invert_yaxis()
    legend_below(drawn, panels[:1], fontsize=8, ncols=2, frameon=False)
    return drawn


def _draw(
    panel: Axes, name: str, rows: Sequence[BenchRow], cells: list[BenchCell], methods: list[str]
) -> None:
    """Draws the quantity `name` in one panel."""
    for number, cell in enumerate(cells):
        color = COLORS[number % len(COLORS)]
        offset = 0.6 * ((number + 0.5) / len(cells) - 0.5)
        shown = [(row, getattr(row, name)) for row in rows if row.cell == cell]
        shown = [(row, spread) for row, spread in shown if spread is not None]
        points = [item for item in shown if item[0].label.method != AGAIN]
        panel.errorbar(
            [spread.median for _, spread in points],
            [methods.index(str(row.label)) + offset for row, _ in points],
            xerr=[
                [spread.median - spread.low for _, spread in points],
                [spread.high - spread.median for _, spread in points],
            ],
            fmt="o",
            markersize=4,
            linewidth=1.2,
            color=color,
            label=plain(str(cell)),
        )
        for _, noise in (item for item in shown if item[0].label.method == AGAIN):
            panel.axvspan(
                min(noise.low, 1), max(noise.high, 1), color="#bbbbbb", alpha=0.35, linewidth=0
            )
    panel.axvline(1, color="#888888", linewidth=0.8)
    panel.set_xlim(left=0)
    bare(panel, grid="y")
