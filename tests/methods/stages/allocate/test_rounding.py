# SPDX-License-Identifier: Apache-2.0
"""Rounding: the largest remainder adds up; shares are raised to what is forced."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.methods.stages.allocate.rounding import largest_remainder, raised


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=80), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_largest_remainder_adds_up_and_stays_near(weights, total):
    shares = [total * weight / sum(weights) for weight in weights]
    counts = largest_remainder(shares, total)
    assert sum(counts) == total
    assert all(abs(count - share) < 1 + 1e-6 for count, share in zip(counts, shares, strict=True))


def test_the_largest_remainder_is_rounded_up_and_ties_go_to_the_earlier_place():
    assert largest_remainder([1.2, 1.7, 1.1], 4) == [1, 2, 1]
    assert largest_remainder([1.5, 1.5, 1.0], 4) == [2, 1, 1]
    assert largest_remainder([0.5, 0.5, 0.5, 0.5], 2) == [1, 1, 0, 0]
    assert largest_remainder([0.29 * 100, 71.0], 100) == [29, 71]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20), st.integers(0, 120))
@settings(max_examples=50, deadline=None)
def test_nothing_exceeds_the_most_and_nothing_is_lost_while_there_is_room(shares, most):
    counts = largest_remainder(shares, sum(shares), most)
    assert max(counts) <= most
    assert sum(counts) == min(sum(shares), most * len(shares))
    assert all(c >= min(share, most) for c, share in zip(counts, shares, strict=True))


@pytest.mark.parametrize(
    ("counts", "least", "expected"),
    [
        ([3, 7, 2, 4], 4, [4, 4, 4, 4]),  # what is missing is all that others have above it
        ([1, 14, 6], 4, [4, 12, 5]),  # 3 missing, of 10 and of 2
        ([2, 64, 6], 4, [4, 64, 4]),  # what is whole gives nothing
        ([2, 3, 5], 4, [3, 3, 4]),  # not enough: nothing is invented
        ([4, 5, 6], 4, [4, 5, 6]),
    ],
)
def test_shares_below_what_is_forced_are_raised_at_the_cost_of_the_others(counts, least, expected):
    assert raised(counts, least, 64) == expected
