# SPDX-License-Identifier: Apache-2.0
"""Spreading an evicted value over its neighbours (CaM), against plain loops in float64."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.methods.stages.merge import value_spread as spread
from kvfold.methods.stages.merge.base import Eviction
from kvfold.methods.stages.merge.value_spread import spread_values
from tests.helpers.evictions import (
    CLOSE,
    assert_rows_are_their_own,
    each_head,
    evict,
    kept_entries,
    without_holes,
)

HEADS = pytest.mark.parametrize("heads", [1, 2, 8])
# (tokens stored, entries kept) of each row: alone; full, padded, nearly everything kept.
ROWS = pytest.mark.parametrize("rows", [[(40, 12)], [(40, 12), (25, 7), (31, 30)]])
SEEDS = st.integers(0, 10_000)


def naive_cam(eviction, targets=32, newest=0, merged=None):
    """Kept values and the chance p of each evicted entry `(row, head, slot)`.

    `merged` says of each whether it is spread; without it the expectation is.
    """
    values = eviction.values.double()
    out, chances = kept_entries(values, eviction), {}
    for b, h, kept, gone in each_head(eviction):
        holes = len(eviction.slots[b, h]) - len(kept)
        place, received = eviction.positions[b, h].tolist(), eviction.column_sums[b, h].tolist()
        for slot in gone[-newest:] if newest else gone:
            after = [j for j, k in enumerate(kept) if place[k] > place[slot]][:targets]
            if not after:
                continue
            mean = sum(received[kept[j]] for j in after) / len(after)
            p = 0.0 if received[slot] == 0 else 1.0
            if mean > 0:
                p = min(1.0, received[slot] / mean)
            chances[b, h, slot] = p
            share = p if merged is None else float(merged[b, h, slot])
            for j in after:
                out[b, h, holes + j] += share * values[b, h, slot] / len(after)
    return out, chances


@HEADS
@ROWS
@pytest.mark.parametrize("targets", [1, 4, 32])
@pytest.mark.parametrize("newest", [0, 1, 3])
def test_spreading_is_the_loop_over_evicted_entries(rows, heads, targets, newest):
    eviction = evict(rows, heads)
    keys, values, state = spread_values(
        eviction, targets=targets, newest=newest, deterministic=True
    )
    expected, _ = naive_cam(eviction, targets, newest)
    assert state is None
    assert torch.equal(without_holes(keys, eviction), kept_entries(eviction.keys, eviction))
    torch.testing.assert_close(without_holes(values, eviction).double(), expected, **CLOSE)


@HEADS
@pytest.mark.parametrize("targets", [1, 4, 32])
def test_one_value_that_leaves_while_decoding(heads, targets):
    eviction = evict([(20, 19), (14, 13)], heads)
    eviction = dataclasses.replace(eviction, slots=eviction.slots[:, :1].expand(-1, heads, -1))
    _, values, _ = spread_values(eviction, targets=targets, deterministic=True)
    expected, _ = naive_cam(eviction, targets)
    torch.testing.assert_close(without_holes(values, eviction).double(), expected, **CLOSE)


@pytest.mark.parametrize("place", range(6))
def test_every_place_of_the_one_that_leaves(place):
    eviction = evict([(6, 6)], heads=1)
    slots = torch.tensor([[[s for s in range(6) if s != place]]])
    eviction = dataclasses.replace(eviction, slots=slots)
    _, values, _ = spread_values(eviction, targets=3, deterministic=True)
    torch.testing.assert_close(values.double(), naive_cam(eviction, 3)[0], **CLOSE)
    gain = (values - kept_entries(eviction.values, eviction)).sum(2)
    chance = naive_cam(eviction, 3)[1].get((0, 0, place), 0.0)
    torch.testing.assert_close(gain, chance * eviction.values[:, :, place], rtol=1e-4, atol=1e-5)


def received(sums):
    """The first entry leaves; all received `sums`; a value of 1 leaves, zeros stay."""
    count = len(sums)
    values = torch.zeros(1, 1, count, 1)
    values[0, 0, 0] = 1.0
    return Eviction(
        torch.randn(1, 1, count, 4),
        values,
        torch.arange(count).view(1, 1, -1),
        torch.arange(1, count).view(1, 1, -1),
        torch.tensor(sums).view(1, 1, -1),
    )


def test_cam_golden_vector():
    _, values, _ = spread_values(
        received([0.2, 0.1, 0.3, 0.5, 0.3, 9.0]), targets=4, deterministic=True
    )
    assert values.flatten().tolist() == pytest.approx([1 / 6] * 4 + [0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("sums", "chance"),
    [
        ([0.0, 0.0, 0.0], 0.0),
        ([0.1, 0.0, 0.0], 1.0),
        ([5.0, 1.0, 1.0], 1.0),
        ([0.0, 1.0, 1.0], 0.0),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_chances_at_their_ends_are_certain(sums, chance, deterministic):
    _, values, _ = spread_values(received(sums), deterministic=deterministic)
    assert values.flatten().tolist() == pytest.approx([chance / 2] * 2)


@pytest.mark.slow
@given(SEEDS, st.integers(2, 30), st.data())
@settings(max_examples=30, deadline=None)
def test_each_draw_spreads_an_entry_wholly_or_not(seed, tokens, data):
    kept = data.draw(st.integers(1, tokens - 1))
    eviction = evict([(tokens, kept)], heads=2, seed=seed)
    eviction = dataclasses.replace(eviction, seed=seed)
    _, values, _ = spread_values(eviction, targets=4)
    chances = naive_cam(eviction, 4)[1]
    merged = {}
    for (b, h, slot), p in chances.items():
        place = eviction.positions[b, h, slot].view(1, 1, 1).expand(1, 2, 1)
        merged[b, h, slot] = spread._uniform(seed, place)[0, h, 0].item() < p
    expected, _ = naive_cam(eviction, 4, merged=merged)
    torch.testing.assert_close(without_holes(values, eviction).double(), expected, **CLOSE)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("kept", [5, 29])
def test_the_mean_of_many_draws_is_the_deterministic_result(kept):
    eviction = evict([(30, kept)], heads=1)
    eviction.column_sums[eviction.column_sums > 0.5] /= 4  # chances far from 0 and 1
    draws, total = 1500, 0.0
    for seed in range(draws):
        total = total + spread_values(dataclasses.replace(eviction, seed=seed), targets=4)[1]
    exact = spread_values(eviction, targets=4, deterministic=True)[1]
    torch.testing.assert_close(total / draws, exact, rtol=0.0, atol=0.06)


def test_draws_are_fixed_by_seed_head_and_position_and_uniform():
    places = torch.arange(4000).expand(1, 8, -1)
    drawn = spread._uniform(3, places)
    assert torch.equal(drawn, spread._uniform(3, places))
    assert torch.equal(drawn[:, :, 1000:], spread._uniform(3, places[:, :, 1000:]))
    assert drawn.min() >= 0 and drawn.max() < 1
    many = torch.cat([spread._uniform(seed, places[:, :2, :50]) for seed in range(300)]).flatten(1)
    for x in (drawn.flatten(), many.flatten()):
        even = torch.linspace(0, 1, x.numel(), dtype=x.dtype)
        assert (x.sort().values - even).abs().max() < 1.95 / math.sqrt(x.numel())
    # Neither heads, nor positions, nor seeds in a row follow each other.
    for table in (drawn[0], drawn[0].T[:8], many.T[:8]):
        correlation = table.corrcoef() - torch.eye(8, dtype=table.dtype)
        assert correlation.abs().max() < 5 / math.sqrt(table.shape[1])


def test_a_row_spreads_as_it_does_alone_and_in_any_order():
    eviction = evict([(40, 12), (25, 7), (31, 30), (10, 10)], heads=3, seed=1)
    eviction = dataclasses.replace(eviction, seed=5)
    for options in ({}, {"newest": 1}, {"deterministic": True}):
        assert_rows_are_their_own(eviction, lambda e, o=options: spread_values(e, **o))


@pytest.mark.slow
@given(SEEDS, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_what_gains_nothing_is_unchanged_bit_for_bit(seed, dtype, one):
    eviction = evict([(30, 29 if one else 12)], heads=1, seed=seed, dtype=dtype)
    gone = [slot for *_, evicted in each_head(eviction) for slot in evicted]
    eviction.column_sums[:, :, gone[::2]] = 0.0
    _, values, _ = spread_values(eviction, targets=2, deterministic=True)
    was = kept_entries(eviction.values, eviction)
    still = (naive_cam(eviction, 2)[0] == was.double()).all(-1)
    assert torch.equal(values[still], was[still])
    eviction.column_sums[:, :, gone] = 0.0
    assert torch.equal(spread_values(eviction, targets=2)[1], was)
