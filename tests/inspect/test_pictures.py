# SPDX-License-Identifier: Apache-2.0
"""Pictures show what was measured."""

from __future__ import annotations

import numpy as np
import pytest

from kvfold.inspect import pictures
from kvfold.inspect.attention_maps import LayerAttention
from kvfold.inspect.inspected_text import InspectedText
from kvfold.inspect.retention import Retention


def test_pictures_show_what_was_measured(
    looked_at: tuple[InspectedText, list[LayerAttention], list[Retention]],
) -> None:
    document, layers, retentions = looked_at
    heat = pictures.attention_figure(layers)
    panels = [axes for axes in heat.axes if axes.get_title("left").startswith("layer")]
    for panel, layer in zip(panels, layers, strict=True):
        shown = panel.collections[0].get_array()
        assert np.allclose(np.ma.filled(shown, 0.0), layer.cells.numpy())
    lines = pictures.norm_figure(layers).axes[0].lines
    assert lines[1].get_xdata().tolist() == layers[1].kept.tolist()
    mean = pictures.variance_figure(layers).axes[0].lines[-1].get_ydata()
    assert mean == pytest.approx([float(layer.variance.mean()) for layer in layers])
    image = pictures.lazy_figure(layers).axes[0].images[0].get_array()
    assert np.allclose(image[2], layers[2].edges.numpy())
    kept = pictures.kept_maps_figure(document, [0, 1, 2, 3], retentions).axes
    assert [panel.get_title("left") for panel in kept] == ["pyramidkv", "adakv"]
    assert np.allclose(kept[1].images[0].get_array(), retentions[1].shares.numpy())
    assert f"{retentions[1].kept_of(document.needles):.1%}" in kept[1].get_title("right")


def test_layers_beyond_a_row_of_heatmaps_go_on_in_the_next(
    looked_at: tuple[InspectedText, list[LayerAttention], list[Retention]],
) -> None:
    layers = looked_at[1] + looked_at[1][:1]
    panels = [panel for panel in pictures.attention_figure(layers).axes if panel.get_visible()]
    # Five heatmaps, the colour bar and the curves.
    assert [panel.get_title("left") for panel in panels].count("layer 0") == 2
    assert len(panels) == 7
