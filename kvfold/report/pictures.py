# SPDX-License-Identifier: Apache-2.0
"""Pareto figures and needle heatmaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvfold.eval.run.cell import FULL
from kvfold.eval.run.cell_result import CellResult
from kvfold.evidence.estimates import Estimate
from kvfold.evidence.grouped import grouped
from kvfold.evidence.pictures import bare, legend_below, plain
from kvfold.report.board import Board
from kvfold.report.style import COLORS, GREY, LineStyle, label
from kvfold.report.summary import ReportRow, budgets, frontier, rows

HOURGLASS = ((-1, 1), (1, 1), (-1, -1), (1, -1), (-1, 1))
MARKERS: dict[str, Any] = {
    "circle": "o", "square": "s", "triangle": "^", "diamond": "D",
    "hourglass": HOURGLASS, "wedge": ">", "pentagon": "p", "arrow": "v",
    "star": "*", "cross": "x", "plus": "+", "dash": "$=$",
}  # fmt: skip
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
WIDE = 3  # panels per row


def pareto(board: Board, styles: dict[str, LineStyle]) -> Figure:
    """Score against measured cache bytes: panels of all tasks, each group and each text.

    Bars are 95 % intervals, the thick line is the Pareto frontier, baselines are grey.
    """
    panels = [("all tasks", board.scored, False)] if board.scored else []
    if len(board.groups) > 1:
        panels += [(g, [r for r in board.scored if r.group == g], False) for g in board.groups]
    panels += [(f"perplexity of {text}", own, True) for text, own in board.texts.items()]
    down = -(-len(panels) // WIDE)
    drawn = Figure(figsize=(4.6 * min(len(panels), WIDE), 3.7 * down + 1.2), layout="constrained")
    axes = drawn.subplots(down, min(len(panels), WIDE), squeeze=False).flatten()
    for panel, (title, results, lower) in zip(axes, panels, strict=False):
        _panel(panel, rows(results), styles, lower)
        panel.set_title(plain(title), loc="left", fontsize=11)
    for spare in axes[len(panels) :]:
        spare.set_visible(False)
    legend_below(drawn, axes, ncols=5, fontsize=8, frameon=False)
    return drawn


def _panel(
    panel: Axes, shown: Sequence[ReportRow], styles: dict[str, LineStyle], lower: bool
) -> None:
    """Draws one Pareto panel: a series per method, the frontier, and the full cache's score."""
    points = [(r, r.bytes_ratio, r.score) for r in shown if r.bytes_ratio and r.score]
    for method in dict.fromkeys(row.method for row, *_ in points):
        own = sorted((x, s.value, *_bar(s)) for row, x, s in points if row.method == method)
        style = styles[method]
        x, y, *error = zip(*own, strict=True)
        panel.errorbar(
            x, y, yerr=error, label=_label(method), marker=MARKERS[style.shape],
            color=GREY if style.color is None else COLORS[style.color],
            linestyle=(0, style.dash) if style.dash else "-",
            markersize=9 if method == FULL else 5, linewidth=0.9, elinewidth=0.9, alpha=0.9,
        )  # fmt: skip
        if method == FULL:
            panel.axhline(y[0], color=GREY, linewidth=0.9, zorder=0)
    whole = [(x, s.value) for row, x, s in points if row.complete]
    edge = [whole[index] for index in frontier(whole, lower)]
    if edge:
        panel.plot(*zip(*edge, strict=True), color="#888888", linewidth=6, alpha=0.25, zorder=0)
    panel.set_xscale("log")
    least = min((x for _, x, _ in points), default=TICKS[0])
    ticks = [tick for tick in TICKS if tick >= least / 1.5]
    panel.set_xticks(ticks, [f"{100 * tick:.0f} %" for tick in ticks], fontsize=8)
    panel.minorticks_off()
    panel.set_xlabel("bytes of the full cache, measured", fontsize=8)
    bare(panel, grid="both")


def _bar(score: Estimate) -> tuple[float, float]:
    """Lengths of the error bar below and above the score; 0 without an interval."""
    low = score.value if score.low is None else score.low
    return score.value - low, (score.value if score.high is None else score.high) - score.value


def needles(results: Sequence[CellResult], styles: dict[str, LineStyle]) -> dict[str, Figure]:
    """One figure per task: a grid of depth × length heatmaps, rows are methods, columns budgets."""
    hidden = [result for result in results if "depth" in result.by]
    tasks = dict.fromkeys(result.cell.task for result in hidden)
    return {task: _maps([r for r in hidden if r.cell.task == task], styles) for task in tasks}


def by_depth(
    results: Sequence[CellResult],
) -> tuple[list[int], list[float], list[list[float | None]]]:
    """Lengths in tokens, depths in percent, and mean scores `[depth][length]` (None if absent)."""
    lengths = sorted({r.cell.length or 0 for r in results})
    depths = sorted({float(depth) for r in results for depth in r.by["depth"]})
    known = grouped(
        ((result.cell.length or 0, float(depth)), score.value)
        for result in results
        for depth, score in result.by["depth"].items()
    )
    at = {key: sum(values) / len(values) for key, values in known.items()}
    return lengths, depths, [[at.get((n, depth)) for n in lengths] for depth in depths]


def _maps(results: Sequence[CellResult], styles: dict[str, LineStyle]) -> Figure:
    """Heatmaps of one task in a grid of methods × budgets."""
    columns: list[str | None] = list(budgets(results))
    columns = [None, *columns] if any(r.cell.budget is None for r in results) else columns
    methods = [method for method in styles if any(r.cell.method == method for r in results)]
    drawn = Figure(
        figsize=(1.5 * len(columns) + 2.2, 1.35 * len(methods) + 0.8), layout="constrained"
    )
    axes = drawn.subplots(len(methods), len(columns), squeeze=False)
    image = None
    for line, method in zip(axes, methods, strict=True):
        for panel, budget in zip(line, columns, strict=True):
            own = [r for r in results if (r.cell.method, r.cell.budget) == (method, budget)]
            panel.set_xticks([])
            panel.set_yticks([])
            panel.spines[:].set_visible(False)
            if own:
                lengths, depths, values = by_depth(own)
                numbers = [[float("nan") if v is None else v for v in row] for row in values]
                image = panel.imshow(numbers, vmin=0, vmax=100, cmap="cividis", aspect="auto")
                panel.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], fontsize=6)
                panel.set_yticks(
                    [0, len(depths) - 1], [f"{d:.0f} %" for d in (depths[0], depths[-1])],
                    fontsize=6,
                )  # fmt: skip
                panel.tick_params(length=0)
        line[0].set_ylabel(_label(method), rotation=0, ha="right", fontsize=8)
    for panel, budget in zip(axes[0], columns, strict=True):
        panel.set_title("no budget" if budget is None else plain(f"kept {budget}"), fontsize=9)
    if image is not None:
        bar = drawn.colorbar(image, ax=axes[0], location="right", aspect=8)
        bar.set_label("score, %", fontsize=7)
        bar.ax.tick_params(labelsize=6, length=0)
        bar.outline.set_visible(False)
    task, where = plain(results[0].cell.task), plain(results[0].haystack or "a haystack")
    drawn.suptitle(f"{task} in {where}: length in tokens across, depth down", fontsize=9)
    return drawn


def _label(method: str) -> str:
    return plain(label(method))
