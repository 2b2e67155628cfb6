# SPDX-License-Identifier: Apache-2.0
"""Line styles: one colour, marker shape and dash per method, the same in all figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvfold.eval.run.cell import FULL, RANDOM, SINKS_AND_RECENT, TRUNCATED
from kvfold.methods.description import shortest
from kvfold.report.summary import ReportRow

# Okabe and Ito (2008), safe for colour blindness; darkened to a contrast of 3 on white.
COLORS = (
    "#0072b2", "#d55e00", "#00916a", "#b04f8f", "#b57f00", "#4b3b9a", "#8c1c3c", "#2f97d1",
)  # fmt: skip
SHAPES = (
    "circle", "square", "triangle", "diamond", "hourglass", "wedge", "pentagon", "arrow",
)  # fmt: skip
# Dash patterns in points, line and gap; () is a solid line. Baselines share one of their own.
DASHES: tuple[tuple[int, ...], ...] = ((), (6, 3), (2, 2), (8, 3, 2, 3), (12, 4))
BASELINE_DASH = (3, 4)
GREY = "#767676"

BASELINES = {
    FULL: "full cache",
    RANDOM: "random eviction",
    SINKS_AND_RECENT: "sinks + recent",
    TRUNCATED: "full cache, cut context",
}
BASELINE_SHAPES = {FULL: "star", RANDOM: "cross", SINKS_AND_RECENT: "plus", TRUNCATED: "dash"}


def label(method: str) -> str:
    """A method's name in legends."""
    return BASELINES.get(method) or shortest(method)


class LineStyle(NamedTuple):
    """Style of a method; `color` is an index into COLORS, None for a baseline's grey."""

    color: int | None
    shape: str
    dash: tuple[int, ...] = BASELINE_DASH


def styles(rows: Sequence[ReportRow]) -> dict[str, LineStyle]:
    """A style for every method of `rows`, in order of mean score; baselines are grey.

    Neighbours in rank differ in colour and shape. Shape and dash alone tell 40 methods apart.
    """
    scores: dict[str, list[float]] = {}
    for row in rows:
        known = scores.setdefault(row.method, [])
        known += [] if row.score is None else [row.score.value]
    methods = sorted(
        (method for method in scores if method not in BASELINES),
        key=lambda method: -sum(scores[method]) / max(len(scores[method]), 1),
    )
    found = {name: LineStyle(None, BASELINE_SHAPES[name]) for name in BASELINES if name in scores}
    for number, method in enumerate(methods):
        round_, color = divmod(number, len(COLORS))
        shape = SHAPES[(number + round_) % len(SHAPES)]
        found[method] = LineStyle(color, shape, DASHES[round_ % len(DASHES)])
    return found
