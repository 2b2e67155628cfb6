# SPDX-License-Identifier: Apache-2.0
"""What is kept, as a grid of text and as a figure."""

from __future__ import annotations

import numpy as np
import torch

from kvfold.inspect.kept import kept_figure, kept_grid


def test_kept_grid_marks_each_head_s_positions() -> None:
    layer = [[torch.tensor([0, 3]), torch.tensor([2])]]
    grid = kept_grid([layer, [[torch.tensor([1]), torch.tensor([], dtype=torch.long)]]], seen=4)
    expected = [[1, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert np.array_equal(grid, np.array(expected, dtype=bool))


def test_kept_figure_has_one_panel_per_label_and_counts_needles() -> None:
    heads = [[torch.arange(10), torch.arange(5, 15)]]
    figure = kept_figure({"first": [heads], "second": [heads]}, 20, [(0, 10)])
    assert [panel.get_title("left") for panel in figure.axes] == ["first", "second"]
    # 20 of 40 entries are kept; of the needle's 20 the heads hold 10 and 5.
    note = figure.axes[0].get_title("right")
    assert "kept 50.0%" in note
    assert "75.0% of those in needles" in note
