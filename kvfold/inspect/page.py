# SPDX-License-Identifier: Apache-2.0
"""Self-contained HTML page with a document, its attention statistics and the entries kept."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvfold.evidence import page as evidence
from kvfold.inspect import attention_maps as maps
from kvfold.inspect.attention_maps import cuts, means
from kvfold.inspect.inspected_text import InspectedText
from kvfold.inspect.retention import Retention
from kvfold.methods.stages.allocate.density import densities

DECADES = 5  # of the logarithmic scale of attention, below 1
# Consecutive line breaks shown as such, and the sign for each further one.
BREAKS, BREAK = 2, "\u21b5"
STRIP = 600  # columns of the lazy-layer map, at most
SCRIPTS = ("charts.js", "document.js", "page.js")


def page(
    title: str,
    document: InspectedText,
    layers: Sequence[maps.LayerAttention],
    retentions: Sequence[Retention],
) -> str:
    """The HTML page; the document's text is embedded as data, never as markup or script."""
    methods = ", ".join(each.method for each in retentions)
    return evidence.page(
        "inspect",
        f"{title}: kvfold inspect",
        f"Attention of {title}, layer by layer, and the entries of a KV cache that {methods} keep.",
        scripts=SCRIPTS,
        data=contents(title, document, layers, retentions),
    )


def contents(
    title: str,
    document: InspectedText,
    layers: Sequence[maps.LayerAttention],
    retentions: Sequence[Retention],
) -> dict[str, Any]:
    """Data of the page's script; grids are row-major bytes in base64."""
    tokens = len(document.pieces)
    return {
        "facts": _facts(title, tokens, layers, retentions),
        "pieces": document.pieces,
        "folded": folded(document.pieces),
        "needles": [vars(needle) for needle in document.needles],
        "layers": [layer.index for layer in layers],
        "heads": retentions[0].heads,
        "methods": [{"name": h.method, "counts": _base64_bytes(h.counts)} for h in retentions],
        "attention": [_attention(layer) for layer in layers],
        "d2o": _share_of_d2o(layers),
        "cuts": cuts(tokens, maps.CELLS),
        "thresholds": maps.THRESHOLDS,
        "most": maps.MOST,
        "sinks": maps.SINKS,
        "window": maps.lazy_window(tokens),
    }


def folded(pieces: Sequence[str]) -> dict[int, str]:
    """Replacements, by index, of pieces with more than `BREAKS` consecutive line breaks."""
    shown, breaks = {}, 0
    for index, piece in enumerate(pieces):
        text = ""
        for letter in piece:
            if letter == "\n":
                text += letter if breaks < BREAKS else BREAK
                breaks += 1
            else:
                text += letter
                breaks = 0 if letter.strip() else breaks
        if text != piece:
            shown[index] = text
    return shown


def _facts(
    title: str, tokens: int, layers: Sequence[maps.LayerAttention], retentions: Sequence[Retention]
) -> list[tuple[str, str]]:
    budgets = dict.fromkeys(h.budget for h in retentions if h.budget != "none")
    facts = [
        ("model", title),
        ("tokens", f"{tokens:,}"),
        ("layers", str(len(layers))),
        ("heads", f"{len(layers[0].entropy)} query, {len(layers[0].variance)} KV"),
    ]
    return facts + [("budget", budget) for budget in budgets]


def _attention(layer: maps.LayerAttention) -> dict[str, Any]:
    return {
        "cells": _base64_bytes(logarithmic(layer.cells)),
        "entropy": _rounded(layer.entropy),
        "holders": layer.holders.tolist(),
        "variance": _rounded(layer.variance),
        "edges": _base64_bytes((255 * means(layer.edges, STRIP)).round()),
        "lazy": layer.lazy,
        "kept": layer.kept.tolist(),
    }


def logarithmic(cells: Tensor) -> Tensor:
    """Attention mass on a log scale: 1 to 255 over `DECADES` decades below 1; 0 for none."""
    level = (cells.clamp(min=1e-30).log10() / DECADES + 1).clamp(0, 1)
    return torch.where(cells > 0, (1 + 254 * level).round(), 0.0)


def _share_of_d2o(layers: Sequence[maps.LayerAttention]) -> list[float]:
    """D2O's layer budgets over the uniform budget (equation 5, normalised across layers)."""
    density = densities([layer.variance[None] for layer in layers], "across_layers")[:, 0]
    return _rounded((-density).softmax(0) * len(layers))


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]


def _base64_bytes(grid: Tensor) -> str:
    return base64.b64encode(grid.to(torch.uint8).numpy().tobytes()).decode()
