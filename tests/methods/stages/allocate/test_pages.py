# SPDX-License-Identifier: Apache-2.0
"""Whole pages beside every way of sharing them, and beside shares rounded by hand."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.methods.stages.allocate.pages import whole_pages
from kvfold.methods.stages.allocate.rounding import largest_remainder


@st.composite
def heads(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Counts, some below 0, forced and stored entries of a few heads."""
    stored = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    counts = [draw(st.integers(-4, all_)) for all_ in stored]
    return counts, [draw(st.integers(0, all_)) for all_ in stored], stored


def nearest(
    counts: list[int], forced: list[int], stored: list[int], size: int, fewest: int
) -> list[int]:
    """Of all ways within the bounds, the one nearest to the counts; earlier heads have more."""
    least = [(count + size - 1) // size for count in forced]
    most = [max(all_ // size, few) for all_, few in zip(stored, least, strict=True)]
    ways = list(product(*(range(few, many + 1) for few, many in zip(least, most, strict=True))))
    wanted = max(fewest, sum(counts) // size)
    total = min(map(sum, ways), key=lambda pages: (abs(pages - wanted), pages))

    def distance(way: tuple[int, ...]) -> tuple[int, list[int]]:
        off = sum((count - size * own) ** 2 for count, own in zip(counts, way, strict=True))
        return off, [-own for own in way]

    best = min((way for way in ways if sum(way) == total), key=distance)
    return [min(own * size, all_) for own, all_ in zip(best, stored, strict=True)]


@given(heads(), st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_pages_are_the_nearest_of_all_ways(given_heads, size, fewest):
    assert whole_pages(*given_heads, size, fewest) == nearest(*given_heads, size, fewest)


@given(st.lists(st.integers(0, 999), min_size=1, max_size=40), st.sampled_from([1, 2, 16, 32]))
@settings(max_examples=100, deadline=None)
def test_without_bounds_they_are_the_largest_remainders(counts, size):
    pages = largest_remainder([count / size for count in counts], sum(counts) // size)
    none, enough = [0] * len(counts), [10**6] * len(counts)
    assert whole_pages(counts, none, enough, size) == [size * each for each in pages]


def test_equal_heads_part_by_a_page():
    assert whole_pages([409] * 3, [32] * 3, [2047] * 3, 32) == [416, 416, 384]


def test_forced_entries_have_pages_and_others_give_them():
    assert whole_pages([40, 40, 40], [0, 33, 33], [99] * 3, 32) == [0, 64, 64]
    assert whole_pages([35, 61], [33, 1], [99, 99], 32) == [64, 32]
    assert whole_pages([64, 40], [1, 33], [99, 99], 32) == [32, 64]


def test_heads_that_store_too_little():
    assert whole_pages([20, 90], [0, 0], [20, 99], 32) == [0, 96]
    assert whole_pages([20, 90], [1, 0], [20, 99], 32) == [20, 64]
    assert whole_pages([40, 90], [33, 0], [40, 99], 32) == [40, 64]


def test_the_fewest_go_to_the_heads_that_want_most():
    assert whole_pages([-9, 3, -2], [0] * 3, [99] * 3, 32) == [0, 0, 0]
    assert whole_pages([-9, 3, -2], [0] * 3, [99] * 3, 32, fewest=2) == [0, 32, 32]
    assert whole_pages([-9, 3, -2], [0] * 3, [99, 31, 99], 32, fewest=1) == [0, 0, 32]
