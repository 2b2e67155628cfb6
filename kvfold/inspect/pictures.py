# SPDX-License-Identifier: Apache-2.0
"""Figures of attention statistics and kept entries, one per view of the papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from kvfold.evidence.pictures import bare
from kvfold.inspect import attention_maps as maps
from kvfold.inspect.attention_maps import cuts, means
from kvfold.inspect.inspected_text import InspectedText
from kvfold.inspect.kept import COLUMNS, maps_figure
from kvfold.inspect.retention import Retention

LEAST = 1e-5  # lower end of the logarithmic scale of attention
# One hue of increasing darkness, readable in greyscale.
SHADES = LinearSegmentedColormap.from_list(
    "attention", ["#f3f6fa", "#c6dbf0", "#75aedb", "#2170b5", "#08306b"]
)
WARM = "#d1495b"
COLD = "#1f4e8c"
GREY = "#888888"
ACROSS = 4  # panels per row


def attention_figure(layers: Sequence[maps.LayerAttention]) -> Figure:
    """Attention heatmaps per layer, and below them entries that hold most of it (PyramidKV)."""
    tokens, rows = len(layers[0].edges), -(-len(layers) // ACROSS)
    figure = Figure(figsize=(11, 2.9 * rows + 2.6), dpi=130)
    figure.set_layout_engine("constrained", h_pad=0.1)
    parts: Any = figure.subfigures(2, 1, height_ratios=[2.9 * rows, 2.6])
    above, below = parts
    panels = above.subplots(rows, ACROSS, squeeze=False).flat
    edges = np.array(cuts(tokens, maps.CELLS))
    for layer, panel in zip(layers, panels, strict=False):
        cells = np.where(layer.cells > 0, layer.cells, np.nan)
        shown = panel.pcolormesh(edges, edges, cells, cmap=SHADES, norm=LogNorm(LEAST, 1))
        panel.invert_yaxis()
        panel.set_aspect("equal")
        panel.set_title(f"layer {layer.index}", loc="left", fontsize=9)
        bare(panel)
        panel.set_xticks([])
        panel.set_yticks([])
    for left_over in panels:
        left_over.set_visible(False)
    above.supxlabel("entry", fontsize=9)
    above.supylabel("query", fontsize=9)
    bar = above.colorbar(shown, ax=above.axes, shrink=0.7, pad=0.01)
    bar.set_label("share of a query's attention", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    _pyramid(below.subplots(), layers, tokens)
    return figure


def variance_figure(layers: Sequence[maps.LayerAttention]) -> Figure:
    """Variance of the column sums: one dot per KV head, a line of layer means (D2O)."""
    figure = Figure(figsize=(11, 3.2), dpi=130, layout="constrained")
    panel = figure.subplots()
    heads = [(layer.index, float(v)) for layer in layers for v in layer.variance]
    panel.plot(*zip(*heads, strict=True), "o", color=GREY, markersize=4, label="KV heads")
    of_layers = [float(layer.variance.mean()) for layer in layers]
    panel.plot(_layer_indices(layers), of_layers, color=COLD, label="mean")
    panel.set_yscale("log")
    panel.set_title("variance of column sums", loc="left", fontsize=10)
    panel.set_xticks(_layer_indices(layers))
    panel.set_xlabel("layer", fontsize=9)
    panel.legend(frameon=False, fontsize=8)
    bare(panel, grid="both")
    return figure


def lazy_figure(layers: Sequence[maps.LayerAttention]) -> Figure:
    """Attention mass on sinks and window, layer × query; dark layers are lazy (SimLayerKV)."""
    tokens = len(layers[0].edges)
    figure = Figure(figsize=(11, 1.6 + 0.22 * len(layers)), dpi=130, layout="constrained")
    panel = figure.subplots()
    mass = np.stack([means(layer.edges, COLUMNS).numpy() for layer in layers])
    extent = (0.0, float(tokens), len(layers) - 0.5, -0.5)
    shown = panel.imshow(
        mass, aspect="auto", cmap=SHADES, vmin=0, vmax=1, extent=extent, interpolation="nearest"
    )
    panel.hlines(np.arange(len(layers) - 1) + 0.5, 0, tokens, colors="white", linewidth=1.5)
    step = -(-len(layers) // 16)
    panel.set_yticks(range(0, len(layers), step), [str(layer.index) for layer in layers[::step]])
    panel.set_ylabel("layer", fontsize=9)
    panel.set_xlabel("query (token)", fontsize=9)
    window = maps.lazy_window(tokens)
    panel.set_title(
        f"attention to the first {maps.SINKS} tokens and the last {window}", loc="left", fontsize=10
    )
    figure.colorbar(shown, ax=panel, pad=0.01).ax.tick_params(labelsize=8)
    bare(panel)
    return figure


def norm_figure(layers: Sequence[maps.LayerAttention]) -> Figure:
    """Relative loss of the last query's attention norm against entries kept (DBudgetKV)."""
    figure = Figure(figsize=(11, 3.6), dpi=130, layout="constrained")
    panel = figure.subplots()
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(layers)))
    for layer, shade in zip(layers, shades, strict=True):
        kept = layer.kept.numpy()
        panel.step(kept, maps.THRESHOLDS, where="pre", color=shade, label=f"layer {layer.index}")
    panel.axhline(0.01, color=WARM, linewidth=1, linestyle="--", label="the paper's 1 %")
    panel.set_yscale("log")
    panel.set_xlim(0, len(layers[0].edges))
    panel.set_xlabel("entries kept: sinks and the newest", fontsize=9)
    panel.set_ylabel("norm lost at most", fontsize=9)
    figure.legend(loc="outside upper left", frameon=False, fontsize=8, ncols=8)
    bare(panel, grid="both")
    return figure


def kept_maps_figure(
    document: InspectedText, layers: Sequence[int], retentions: Sequence[Retention]
) -> Figure:
    """Layer × position map per method: the share of KV heads that store a token."""
    grids = {retention.method: retention.shares.numpy() for retention in retentions}
    needles = [(needle.start, needle.stop) for needle in document.needles]
    return maps_figure(grids, needles, 1, "layer, shade: share of KV heads", layers)


def _pyramid(panel: Axes, layers: Sequence[maps.LayerAttention], tokens: int) -> None:
    """Draws `CURVES` over layers: mean over heads, and a band from minimum to maximum."""
    for label, color, found in CURVES:
        heads = [found(layer).numpy() for layer in layers]
        low, mean, high = ([float(f(v)) for v in heads] for f in (np.min, np.mean, np.max))
        panel.fill_between(_layer_indices(layers), low, high, color=color, alpha=0.15, linewidth=0)
        panel.plot(_layer_indices(layers), mean, color=color, marker="o", markersize=4, label=label)
    panel.set_yscale("log")
    panel.set_ylim(1, tokens)
    panel.set_xticks(_layer_indices(layers))
    panel.set_xlabel("layer", fontsize=9)
    panel.set_ylabel(f"entries, of {tokens:,}", fontsize=9)
    panel.legend(frameon=False, fontsize=8, title="band: heads", title_fontsize=8)
    bare(panel, grid="both")


CURVES: tuple[tuple[str, str, Callable[[maps.LayerAttention], Tensor]], ...] = (
    (f"hold {maps.MOST:.0%} of all attention", COLD, lambda layer: layer.holders.float()),
    ("one query attends to (exp of its entropy)", WARM, lambda layer: layer.entropy.exp()),
)


def _layer_indices(layers: Sequence[maps.LayerAttention]) -> list[int]:
    return [layer.index for layer in layers]
