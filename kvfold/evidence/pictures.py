# SPDX-License-Identifier: Apache-2.0
"""Parts of all figures: names as they are, bare axes, and files that are replaced as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvfold.errors import KvfoldError
from kvfold.writing import replacing


def plain(text: str) -> str:
    """A name with $ escaped, which matplotlib would read as mathematics between two of them."""
    return text.replace("$", r"\$")


def bare(panel: Axes, grid: Literal["both", "y"] | None = None) -> None:
    """Leaves out a panel's frame and ticks; `grid` says along which axes it has pale lines."""
    panel.spines[:].set_visible(False)
    panel.tick_params(which="both", length=0, labelsize=8)
    if grid is not None:
        panel.grid(axis=grid, color="#ececec", linewidth=0.8)
        panel.set_axisbelow(True)


def legend_below(drawn: Figure, panels: Iterable[Axes], **options: Any) -> None:
    """One legend of all panels below them, each label once."""
    handles = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    drawn.legend(handles.values(), handles.keys(), loc="outside lower center", **options)


def save(figure: Figure, path: Path, **options: Any) -> None:
    """Writes a figure in the format of the path's ending; KvfoldError if it cannot."""
    try:
        with replacing(path) as temporary:
            figure.savefig(temporary, format=path.suffix.removeprefix("."), **options)
    except ValueError as problem:  # matplotlib's, of texts and sizes
        raise KvfoldError(f"cannot write {path}: {problem}") from problem
