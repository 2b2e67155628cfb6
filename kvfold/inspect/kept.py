# SPDX-License-Identifier: Apache-2.0
"""Figure of the positions that each method kept, per layer and KV head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor

from kvfold.evidence.pictures import bare, plain

# positions[l][b][h]: 1-D tensor of stored token positions, from `cache.positions(l)`.
Positions = Sequence[Sequence[Sequence[Tensor]]]

INK = LinearSegmentedColormap.from_list("kept", ["#eef1f5", "#1f4e8c"])
NEEDLE = "#d1495b"
COLUMNS = 1200  # pixels across, at most
TICKS = 8  # labelled layers, at most


def kept_figure(
    kept: Mapping[str, Positions],
    seen: int,
    needles: Sequence[tuple[int, int]] = (),
    *,
    row: int = 0,
) -> Figure:
    """One panel per label: x = position, y = layer × KV head, blue where an entry was kept.

    Args:
        kept: label → positions `[L][B][H]`.
        seen: tokens seen, the range of the x axis.
        needles: spans `(start, stop)` of positions, marked in red above each panel.
        row: the row of the batch to draw.
    """
    grids = {label: kept_grid(positions, seen, row) for label, positions in kept.items()}
    heads = max(len(positions[0][row]) for positions in kept.values())
    return maps_figure(grids, needles, heads, "layer, one line per KV head")


def maps_figure(
    grids: Mapping[str, np.ndarray],
    needles: Sequence[tuple[int, int]],
    lines: int,
    rows: str,
    layers: Sequence[int] | None = None,
) -> Figure:
    """One panel per label.

    Args:
        grids: label → `[L·lines, seen]` in [0, 1], the share of a position that was kept.
        needles: spans `(start, stop)` of positions, marked in red above each panel.
        lines: lines of a grid per layer.
        rows: label of the y axis.
        layers: L indices of the layers, by default 0, 1, 2, …
    """
    figure = Figure(figsize=(11, 0.7 + 1.35 * len(grids)), dpi=130, layout="constrained")
    panels = figure.subplots(len(grids), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (label, grid) in zip(panels, grids.items(), strict=True):
        _draw(panel, grid, lines, layers or range(len(grid) // lines))
        _mark(panel, needles)
        panel.set_title(plain(label), loc="left", fontsize=10, pad=9)
        note = f"kept {grid.mean():.1%} of the entries"
        if needles:
            inside = np.concatenate([grid[:, start:stop] for start, stop in needles], axis=1)
            note += f", {inside.mean():.1%} of those in needles (red)"
        panel.set_title(note, loc="right", fontsize=8, color="#555555", pad=9)
    panels[-1].set_xlabel("position in the document (tokens)")
    figure.supylabel(rows, fontsize=9)
    return figure


def kept_grid(positions: Positions, seen: int, row: int = 0) -> np.ndarray:
    """Bool grid `[L·H, seen]`: true where a layer's KV head kept a position."""
    heads = [head for layer in positions for head in layer[row]]
    grid = np.zeros((len(heads), seen), dtype=bool)
    for line, head in zip(grid, heads, strict=True):
        line[head.cpu().numpy()] = True
    return grid


def _draw(panel: Axes, grid: np.ndarray, heads: int, names: Sequence[int]) -> None:
    """Draws a grid `[L·heads, seen]`: `heads` lines per layer, white lines between layers."""
    lines, seen = grid.shape
    # One column per pixel; a column over several positions shows the share kept.
    edges = np.linspace(0, seen, min(seen, COLUMNS) + 1).astype(int)
    shades = np.add.reduceat(grid.astype(float), edges[:-1], axis=1) / np.diff(edges)
    panel.imshow(
        shades,
        aspect="auto",
        cmap=INK,
        vmin=0,
        vmax=1,
        interpolation="nearest",
        extent=(0, seen, lines, 0),
    )
    panel.hlines(range(heads, lines, heads), 0, seen, colors="white", linewidth=1.5)
    layers = range(0, lines // heads, -(-lines // heads // TICKS))
    places = [heads * (layer + 0.5) for layer in layers]
    panel.set_yticks(places, [str(names[layer]) for layer in layers])
    bare(panel)


def _mark(panel: Axes, needles: Sequence[tuple[int, int]]) -> None:
    for start, stop in needles:
        panel.axvspan(start, stop, ymin=1.02, ymax=1.09, color=NEEDLE, linewidth=0, clip_on=False)
