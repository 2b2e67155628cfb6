# SPDX-License-Identifier: Apache-2.0
"""Score and kept part over the threshold of SimLayerKV and DBudgetKV, a picture of docs/claims.md.

Letters are sized for a width of 390 pixels; score and kept part differ in dash and marker.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from matplotlib.axes import Axes

import kvfold
from docs.generate.made import LETTERS, picture
from kvfold.eval.run.cell import TRUNCATED
from kvfold.report.load import load_results
from kvfold.report.style import COLORS, GREY

FILE = "thresholds.svg"
# Folder of the records, and the method whose threshold changes in them.
METHODS = {"simlayerkv": "simlayerkv:window=128", "dbudgetkv": "dbudgetkv"}
TITLES = {"simlayerkv": "SimLayerKV", "dbudgetkv": "DBudgetKV"}


class Point(NamedTuple):
    """A threshold, and percent over all tasks of right answers and of entries kept."""

    threshold: float
    score: float
    kept: float


def curve(records: Path, folder: str) -> list[Point]:
    """Points of a method whose records differ in nothing but the threshold, ascending."""
    usual: Any = kvfold.parse(METHODS[folder])
    found = defaultdict(list)
    for one in load_results([records / folder / "records.jsonl"]):
        if one.cell.method == TRUNCATED or one.score is None or one.kept is None:
            continue
        method: Any = kvfold.parse(one.cell.method)
        alike = type(method) is type(usual)
        if alike and replace(method, threshold=usual.threshold) == usual:
            found[method.threshold].append((one.score.value, 100 * one.kept))
    return [
        Point(threshold, *(mean(values) for values in zip(*pairs, strict=True)))
        for threshold, pairs in sorted(found.items())
    ]


def draw(records: Path, path: Path) -> None:
    """Writes the picture; equal records give an equal file."""
    with picture(path, 6.4, 4.2) as drawn:
        panels = drawn.subplots(1, len(METHODS), sharey=True)
        for panel, folder in zip(panels, METHODS, strict=True):
            _panel(panel, curve(records, folder), TITLES[folder])
        panels[0].set_ylabel("percent")
        panels[1].set_xscale("log")
        drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)


def _panel(panel: Axes, points: list[Point], title: str) -> None:
    thresholds, scores, kept = zip(*points, strict=True)
    panel.plot(thresholds, scores, color=COLORS[0], marker="o", label="score")
    panel.plot(thresholds, kept, color=GREY, marker="s", dashes=(4, 3), label="entries kept")
    panel.set_title(title, fontsize=LETTERS)
    panel.set_xlabel("threshold")
    panel.grid(alpha=0.3)
