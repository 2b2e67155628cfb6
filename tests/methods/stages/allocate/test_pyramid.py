# SPDX-License-Identifier: Apache-2.0
"""Allocation: the published pyramids, and sums that are exact."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.methods.stages.allocate.pyramid import pyramid, pyramid_official
from kvfold.methods.stages.allocate.uniform import uniform

LAYERS = st.integers(1, 80)
BETA = st.one_of(st.integers(1, 40), st.floats(1, 40))


def beside_window(seen, layers, budget, window):
    """cap_0 … cap_{L−1} of the released code: what its layers keep beside the window."""
    kept = pyramid_official(budget * layers, seen, layers, window, beta=20)
    return [count - window for count in kept]


@pytest.mark.parametrize(
    ("seen", "layers", "budget", "first", "last", "step", "total"),
    [
        (8000, 32, 128, 234, 17, 7, 4016),
        (8000, 32, 64, 110, 17, 3, 2032),
        (8000, 32, 2048, 3978, 103, 125, 65_296),
        (8000, 80, 128, 234, 76, 2, 12_400),
        (8000, 80, 64, 110, 31, 1, 5640),
        (8000, 80, 2048, 3978, 107, 49, None),
        (8000, 28, 512, 983, 38, 35, 14_294),
        (241, 32, 128, 233, 16, 7, None),
        (4080, 32, 2048, 3978, 103, None, None),
    ],
)
def test_official_pyramid_reproduces_the_released_integers(
    seen, layers, budget, first, last, step, total
):
    caps = beside_window(seen, layers, budget, window=8)
    assert len(caps) == layers
    assert (caps[0], caps[-1]) == (first, last)
    steps = {a - b for a, b in pairwise(caps)}
    assert len(steps) == 1
    assert step is None or steps == {step}
    assert total is None or sum(caps) == total


@pytest.mark.parametrize(("layers", "worst"), [(32, 15), (80, 39)])
def test_official_pyramid_overspends_at_worst_as_published(layers, worst):
    excess = [
        sum(beside_window(8000, layers, budget, window=8)) // layers - (budget - 8)
        for budget in range(64, 2049)
    ]
    assert max(excess) == worst
    assert min(excess) >= 0


def test_official_pyramid_is_uniform_where_twice_the_base_does_not_fit():
    assert beside_window(239, 32, 128, window=8) == [120] * 32
    assert beside_window(128, 32, 128, window=8) == [120] * 32
    assert beside_window(240, 32, 128, window=8)[0] > 120


def test_official_pyramid_keeps_a_prompt_shorter_than_the_budget():
    assert pyramid_official(128 * 32, 127, 32, window=8, beta=20) == [127] * 32


def test_the_paper_s_example_by_hand():
    # base 10, top 10/5 = 2, bottom 20 − 2 = 18, one window of 3 on top of each.
    assert pyramid(13 * 5, 1000, 5, window=3, beta=5) == [21, 17, 13, 9, 5]


def test_overflow_goes_to_the_next_layers():
    # 18, 14, 10, 6, 2 in a prompt with room for 12 beside the window.
    assert pyramid(13 * 5, 15, 5, window=3, beta=5) == [15, 15, 15, 15, 5]


@given(st.integers(1, 5000), LAYERS, st.integers(0, 64), st.floats(0, 1), BETA)
@settings(max_examples=50, deadline=None)
def test_pyramid_spends_its_total_and_never_grows_with_depth(room, layers, window, part, beta):
    seen = room + window
    total = layers * window + int(part * layers * room)
    counts = pyramid(total, seen, layers, window, beta)
    assert len(counts) == layers
    assert sum(counts) == total
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= total / layers >= counts[-1]
    assert window <= min(counts) and max(counts) <= seen


@given(LAYERS, st.integers(0, 64), st.integers(0, 100_000), BETA)
@settings(max_examples=50, deadline=None)
def test_pyramid_follows_the_arithmetic_sequence(layers, window, inside, beta):
    counts = pyramid(inside + layers * window, 10**6, layers, window, beta)
    base = inside / layers
    for layer, count in enumerate(counts if layers > 1 else []):
        exact = 2 * base - base / beta - layer * 2 * (base - base / beta) / (layers - 1)
        assert abs(count - window - exact) < 1 + 1e-6


@given(LAYERS, st.integers(0, 64), st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_a_pyramid_of_beta_one_is_uniform(layers, window, extra):
    total = layers * window + extra
    assert pyramid(total, 10**6, layers, window, beta=1) == uniform(total, 10**6, layers)


@given(st.integers(1, 80), st.integers(1, 64), st.data())
@settings(max_examples=50, deadline=None)
def test_a_total_below_the_windows_is_shared_evenly(layers, window, data):
    total = data.draw(st.integers(1, layers * window))
    counts = pyramid(total, 1000, layers, window, beta=20)
    assert sum(counts) == total
    assert max(counts) - min(counts) <= 1


def test_a_pyramid_that_cannot_be_held_keeps_everything():
    assert pyramid(100 * 4, 50, 4, window=8, beta=20) == [50] * 4
