# SPDX-License-Identifier: Apache-2.0
"""Which positions each method kept, per layer and KV head, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor

# positions[l][b][h]: original positions stored, 1-D; what `cache.positions(l)` gives for each l.
Positions = Sequence[Sequence[Sequence[Tensor]]]

INK = LinearSegmentedColormap.from_list("kept", ["#eef1f5", "#1f4e8c"])
NEEDLE = "#d1495b"
COLUMNS = 1200


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
        seen: tokens seen, the width of the picture.
        needles: spans `(start, stop)` of positions, marked in red above each panel.
        row: which row of the batch is drawn.
    """
    figure = Figure(figsize=(11, 0.7 + 1.35 * len(kept)), dpi=130, layout="constrained")
    panels = figure.subplots(len(kept), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (label, positions) in zip(panels, kept.items(), strict=True):
        grid = kept_grid(positions, seen, row)
        _draw(panel, grid, heads=len(positions[0][row]))
        _mark(panel, needles)
        _caption(panel, label, grid, needles)
    panels[-1].set_xlabel("position in the document (tokens)")
    figure.supylabel("layer, one line per KV head", fontsize=9)
    return figure


def kept_grid(positions: Positions, seen: int, row: int = 0) -> np.ndarray:
    """`[L·H, seen]` bool: whether a layer's KV head kept a position."""
    heads = [head for layer in positions for head in layer[row]]
    grid = np.zeros((len(heads), seen), dtype=bool)
    for line, head in zip(grid, heads, strict=True):
        line[head.cpu().numpy()] = True
    return grid


def _draw(panel: Axes, grid: np.ndarray, heads: int) -> None:
    lines, seen = grid.shape
    # About one column per pixel: where it covers several positions its shade is the share kept.
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
    layers = range(lines // heads)
    panel.set_yticks([heads * (layer + 0.5) for layer in layers], [str(layer) for layer in layers])
    panel.tick_params(length=0, labelsize=8)
    panel.spines[:].set_visible(False)


def _mark(panel: Axes, needles: Sequence[tuple[int, int]]) -> None:
    for start, stop in needles:
        panel.axvspan(start, stop, ymin=1.02, ymax=1.09, color=NEEDLE, linewidth=0, clip_on=False)


def _caption(panel: Axes, label: str, grid: np.ndarray, needles: Sequence[tuple[int, int]]) -> None:
    panel.set_title(label, loc="left", fontsize=10, pad=9)
    note = f"kept {grid.mean():.1%} of the entries"
    if needles:
        inside = np.concatenate([grid[:, start:stop] for start, stop in needles], axis=1)
        note += f", {inside.mean():.1%} of those in needles (red)"
    panel.set_title(note, loc="right", fontsize=8, color="#555555", pad=9)
