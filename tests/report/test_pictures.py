# SPDX-License-Identifier: Apache-2.0
"""Pictures: colours, shapes, needles by depth."""

from __future__ import annotations

import itertools

from kvfold.report import summary
from kvfold.report.pictures import MARKERS, by_depth
from kvfold.report.style import COLORS, styles
from tests.helpers.reports import known, made


def test_the_best_methods_have_colours_of_their_own() -> None:
    count = len(COLORS) + 3
    results = [made(f"m{n}", "0.2", (float(n), 1.0)) for n in range(count)]
    found = styles(summary.rows([made(), *results, made("random", "0.2")]))
    assert found["full"].color is None and found["random"].color is None
    assert len(set(found.values())) == count + 2
    own = [style for style in found.values() if style.color is not None]
    assert len({(style.shape, style.dash) for style in own if style.color == 0}) == 2
    assert all(one.shape != other.shape for one, other in itertools.pairwise(own))
    best = [f"m{n}" for n in range(count - 1, count - 1 - len(COLORS), -1)]
    assert [found[name].color for name in best] == list(range(len(COLORS)))


def test_methods_of_one_colour_differ_in_shape_and_dash() -> None:
    count = 3 * len(COLORS)
    results = [made(f"m{n}", "0.2", (float(n), 1.0)) for n in range(count)]
    found = styles(summary.rows(results))
    for color in range(len(COLORS)):
        same = [style for style in found.values() if style.color == color]
        assert len({style.shape for style in same}) == len({style.dash for style in same}) == 3


def test_forty_methods_differ_in_shape_or_dash() -> None:
    results = [made(f"m{n}", "0.2", (float(n), 1.0)) for n in range(40)]
    found = styles(summary.rows(results)).values()
    assert len({(style.shape, style.dash) for style in found}) == 40
    assert {style.shape for style in found} <= MARKERS.keys()


def test_needles_by_length_and_depth() -> None:
    short = made(by={"depth": {"0.0": known(1, 0)}})
    long = made(
        by={"depth": {"100.0": known(3, 0), "0.0": known(2, 0)}},
        length=2048,
    )
    assert by_depth([long, short]) == ([1024, 2048], [0.0, 100.0], [[1.0, 2.0], [None, 3.0]])
