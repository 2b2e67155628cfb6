# SPDX-License-Identifier: Apache-2.0
"""One colour, shape and dash for a method, the same wherever it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvfold.eval.run.cell import CUT, FULL, RANDOM, SINKS_AND_RECENT
from kvfold.report.summary import Row

# After Okabe and Ito (2008), for every kind of colour vision; darkened to a contrast of 3 on white.
COLORS = (
    "#0072b2", "#d55e00", "#00916a", "#b04f8f", "#b57f00", "#4b3b9a", "#8c1c3c", "#2f97d1",
)  # fmt: skip
SHAPES = ("circle", "square", "triangle", "diamond")
# Lengths of line and gap, in points; none: a whole line. Baselines have one of their own.
DASHES: tuple[tuple[int, ...], ...] = ((), (6, 3), (2, 2), (8, 3, 2, 3))
BASELINE_DASH = (3, 4)
GREY = "#767676"

BASELINES = {
    FULL: "full cache",
    RANDOM: "random eviction",
    SINKS_AND_RECENT: "sinks + recent",
    CUT: "full cache, cut context",
}
BASELINE_SHAPES = {FULL: "star", RANDOM: "cross", SINKS_AND_RECENT: "plus", CUT: "dash"}


class Look(NamedTuple):
    """How a method is drawn; `color` counts in COLORS, None for the grey of a baseline."""

    color: int | None
    shape: str
    dash: tuple[int, ...] = BASELINE_DASH


def looks(rows: Sequence[Row]) -> dict[str, Look]:
    """Every method of `rows`; baselines are grey.

    Neighbours in rank differ in colour and shape, methods of one colour in shape and dash.
    """
    scores: dict[str, list[float]] = {}
    for row in rows:
        known = scores.setdefault(row.method, [])
        known += [] if row.score is None else [row.score.value]
    methods = sorted(
        (method for method in scores if method not in BASELINES),
        key=lambda method: -sum(scores[method]) / max(len(scores[method]), 1),
    )
    found = {name: Look(None, BASELINE_SHAPES[name]) for name in BASELINES if name in scores}
    for number, method in enumerate(methods):
        round_, color = divmod(number, len(COLORS))
        shape = SHAPES[(number + round_) % len(SHAPES)]
        found[method] = Look(color, shape, DASHES[round_ % len(DASHES)])
    return found
