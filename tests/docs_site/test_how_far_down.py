# SPDX-License-Identifier: Apache-2.0
"""docs/how-far-down.md: its tables and its picture are those of the records."""

from __future__ import annotations

from typing import Any

import pytest

from docs.generate import match_page as pages
from docs.generate.made import with_part


def row(text: str, method: str, kept: float, kl: float, nbytes: int = 100) -> Any:
    return pages.Row(
        text=text,
        seed=1,
        tokens=880,
        method=method,
        kept=kept,
        kl=kl,
        agree=0.9,
        right=2,
        asked=3,
        nbytes=nbytes,
        operations=10,
        reading=3.0,
        repetition=4.0,
        compression=0.5,
        errors=None,
        guarded=0,
    )


def test_the_published_tables_and_picture_are_those_of_the_records(tmp_path):
    rows = pages.load()
    text = pages.PAGE.read_text(encoding="utf-8")
    for name, made in pages.TABLES.items():
        assert with_part(text, pages.BEGIN.format(name), made(rows)) == text
    pages.draw(rows, tmp_path / pages.PICTURE)
    published = (pages.OUT / pages.PICTURE).read_bytes()
    assert (tmp_path / pages.PICTURE).read_bytes() == published


def test_records_hold_no_text():
    names = {each.text for each in pages.load()}
    assert all(len(name) < 60 and " " not in name for name in names)


def test_kl_between_two_budgets_is_log_linear_in_bytes():
    points = [(100.0, 1.0), (400.0, 0.25), (800.0, 0.05)]
    assert pages.at_bytes(points, 400) == pytest.approx(0.25)
    assert pages.at_bytes(points, 200) == pytest.approx(0.5)
    assert pages.at_bytes(points, 50) == pytest.approx(2)  # as between the two nearest
    assert pages.at_bytes(points, 1600) == pytest.approx(0.01)


def test_no_distance_is_told_far_beyond_a_methods_own_budgets():
    """Within its bytes it is interpolated, and a twentieth beyond them."""

    def at(nbytes: int) -> list[float]:
        rows = [row("a", "kvzip", 0.1, 0.2, nbytes)]
        rows += [row("a", "x", 0.1, 1.0, 100), row("a", "x", 0.2, 0.25, 400)]
        return pages.at_equal_bytes(rows, "x", 0.1)

    assert at(200) == pytest.approx([0.5])
    assert len(at(96)) == len(at(415)) == 1
    assert at(94) == at(425) == []


def test_pairs_are_of_the_same_passages():
    rows = [row(text, "kvzip", 0.1, 0.2) for text in ("a", "b", "c")]
    rows += [row("a", "match", 0.1, 0.1), row("b", "match", 0.1, 0.15)]
    rows += [row("d", "match", 0.1, 9.0), row("c", "match", 0.2, 9.0)]
    pairs = pages.Pairs.of(rows, "match", 0.1)
    assert [each.text for each in pairs.own] == [each.text for each in pairs.base] == ["a", "b"]
    assert pairs.ratio() == pytest.approx(0.25 / 0.4)
    low, high = pairs.interval()
    assert (low, high) == pytest.approx((0.5, 0.75))  # both books alike, as some draws have it


def test_passages_that_a_method_lacks_are_left_out():
    rows = [row(text, "x", kept, 1) for text in ("a", "b") for kept in (0.1, 0.2)]
    rows += [
        row("a", "y", 0.1, 1),
        row("a", "y", 0.2, 1),
        row("b", "y", 0.2, 1),
    ]
    assert {each.text for each in pages.measured(rows, ["x", "y"])} == {"a"}
    assert {each.text for each in pages.measured(rows, ["x"])} == {"a", "b"}
