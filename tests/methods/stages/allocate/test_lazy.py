# SPDX-License-Identifier: Apache-2.0
"""SimLayerKV: attention at the edges against naive sums, and the layers that it trims."""

import dataclasses
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.lazy import (
    is_lazy,
    laziness,
    lazy_size,
    mass_of_last_queries,
    mass_of_last_query,
    pyramid_layers,
    random_layers,
)
from tests.helpers.observations import alone, naive_rows, observe

GROUPS = pytest.mark.parametrize("groups", [1, 4, 8])
SINKS, WINDOW = 2, 6


def naive_last_query(seen):
    """Row 0 without padding: the mass of its newest query, mean over the query heads."""
    row = naive_rows(seen)[:, -1]
    stored = row.shape[-1]
    edges = {j for j in range(stored) if j < SINKS or j >= stored - WINDOW}
    return sum(float(head[j]) for head in row for j in edges) / len(row)


def naive_last_queries(seen, last, recent):
    rows = naive_rows(seen)[:, -last:]
    heads, queries, stored = rows.shape
    total = 0.0
    for head in rows:
        for w, row in enumerate(head):
            query = stored - queries + w
            for j in range(stored):
                if j < SINKS or query - recent <= j < query:
                    total += float(row[j])
    return total / (heads * queries)


# --- the mass at the edges ---------------------------------------------------------------------


@GROUPS
@pytest.mark.parametrize("lengths", [[40], [40, 31, 9]])
def test_the_last_query_s_mass_is_the_naive_sum(groups, lengths):
    seen = observe(lengths, groups=groups)
    mass = mass_of_last_query(seen, sinks=SINKS, window=WINDOW)
    expected = [naive_last_query(alone(seen, row, n)) for row, n in enumerate(lengths)]
    assert mass.tolist() == pytest.approx(expected, abs=1e-5)


@GROUPS
@pytest.mark.parametrize(("last", "recent"), [(1, 6), (5, 3), (8, 100)])
@pytest.mark.parametrize("lengths", [[40], [40, 31, 4]])
def test_the_last_queries_mass_is_the_naive_sum(groups, last, recent, lengths):
    seen = observe(lengths, groups=groups)
    mass = mass_of_last_queries(seen, sinks=SINKS, last=last, recent=recent)
    expected = [
        naive_last_queries(alone(seen, row, n), last, recent) for row, n in enumerate(lengths)
    ]
    assert mass.tolist() == pytest.approx(expected, abs=1e-5)


def test_only_the_last_query_counts_its_own_entry():
    # Logits of 0 for all keys but the query's own: 10 tokens, so nearly everything goes to it.
    keys = torch.zeros(1, 1, 10, 2)
    keys[..., -1, 0] = 20.0
    positions = torch.arange(10).view(1, 1, 10)
    query = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    seen = Observation(keys, keys, positions, query, positions[:, 0, -1:])
    assert mass_of_last_query(seen, sinks=1, window=3).item() == pytest.approx(1.0)
    others = mass_of_last_queries(seen, sinks=1, last=1, recent=3).item()
    assert others == pytest.approx(4 / (9 + math.exp(20)), rel=1e-4)


def test_the_window_is_of_stored_entries_where_some_are_gone():
    seen = observe([12])
    places = torch.tensor([0, 1, 2, 3, 20, 22, 24, 26, 28, 30, 31, 32])
    gone = dataclasses.replace(
        seen,
        positions=places.expand(1, 2, 12),
        query_positions=seen.query_positions + 21,
    )
    mass = mass_of_last_query(gone, sinks=SINKS, window=WINDOW)
    assert mass.item() == pytest.approx(naive_last_query(seen), abs=1e-5)


def test_a_mass_never_exceeds_one():
    # Rounding makes some of these rows add up to more than 1.
    for length in range(40, 70):
        seen = observe([length], groups=1)
        last = partial(mass_of_last_query, sinks=4, window=100)
        for mass in (last, partial(mass_of_last_queries, sinks=100, last=1, recent=100)):
            assert mass(seen).item() == pytest.approx(1.0)
            assert not is_lazy(seen, mass, threshold=1.0, kept=1).any()


# --- lazy layers -------------------------------------------------------------------------------

MASS = partial(mass_of_last_query, sinks=SINKS, window=WINDOW)
KEPT = SINKS + WINDOW
LENGTHS = [40, 31, 9, 8, 3]


def above(threshold, **options):
    return partial(is_lazy, mass=MASS, threshold=threshold, kept=KEPT, **options)


def test_a_row_is_lazy_above_the_threshold():
    seen = observe(LENGTHS)
    masses = MASS(seen).tolist()
    for row in range(3):
        for threshold, size in ((masses[row] - 1e-4, KEPT), (masses[row], LENGTHS[row])):
            counts = lazy_size(seen, above(threshold), kept=KEPT)
            assert counts[row] == size
    assert len({round(mass, 3) for mass in masses[:3]}) == 3


@pytest.mark.parametrize(("threshold", "kept"), [(-1.0, [8, 8, 8, 8, 3]), (1.0, LENGTHS)])
def test_thresholds_beyond_every_mass(threshold, kept):
    counts = lazy_size(observe(LENGTHS), above(threshold), kept=KEPT)
    assert counts.tolist() == kept


@pytest.mark.slow
@given(st.floats(-0.1, 1.1), st.floats(0, 0.5))
@settings(max_examples=50, deadline=None)
def test_raising_the_threshold_adds_no_lazy_row(threshold, step):
    seen = observe(LENGTHS)
    low = above(threshold)(seen)
    high = above(threshold + step)(seen)
    assert not (high & ~low).any()
    sizes = lazy_size(seen, above(threshold), kept=KEPT)
    assert sizes.tolist() == [
        KEPT if lazy else length for lazy, length in zip(low.tolist(), LENGTHS, strict=True)
    ]


def test_the_last_layer_may_be_kept():
    for layer, kept in ((2, [8, 8]), (3, [40, 31])):
        seen = observe([40, 31], layer=layer, layers=4)
        counts = lazy_size(seen, above(-1.0, keep_last_layer=True), kept=KEPT)
        assert counts.tolist() == kept


# --- the strategies it is compared with --------------------------------------------------------


def facts(lazy, stored, seed=7):
    """What `laziness` says of each layer: lists `[L][B]`."""
    rows = zip(lazy, stored, strict=True)
    return [
        torch.tensor([[int(a), b, seed + layer] for a, b in zip(of_layer, sizes, strict=True)])
        for layer, (of_layer, sizes) in enumerate(rows)
    ]


def test_laziness_holds_what_the_strategies_need():
    seen = observe(LENGTHS, seed=5)
    threshold = MASS(seen)[1].item() - 1e-4
    lazy = above(threshold)(seen).tolist()
    found = laziness(seen, above(threshold))
    assert found.tolist() == [[int(a), b, 5] for a, b in zip(lazy, LENGTHS, strict=True)]
    assert lazy[1] and not lazy[3]


LAZY = [[i in (1, 4, 5), i in (3,), False] for i in range(8)]
STORED = [[100, 60, 7]] * 8


def trimmed(counts):
    """Which layers are trimmed, of each row."""
    table = torch.stack(counts)
    assert table.le(torch.tensor(STORED)).all()
    rows = []
    for row, stored in enumerate(STORED[0]):
        column = table[:, row].tolist()
        assert set(column) <= {stored, KEPT}
        rows.append([layer for layer, count in enumerate(column) if count < stored])
    return rows


@pytest.mark.parametrize(
    ("among", "allowed"), [("all", range(8)), ("bottom", range(4)), ("top", range(4, 8))]
)
def test_random_layers_are_as_many_as_the_lazy_ones(among, allowed):
    nobody = torch.zeros(3, dtype=torch.long)
    found = set()
    for seed in range(40):
        counts = random_layers(facts(LAZY, STORED, seed), nobody, nobody, kept=KEPT, among=among)
        layers = trimmed(counts)
        assert [len(row) for row in layers] == [3, 1, 0]
        assert set(layers[0]) | set(layers[1]) <= set(allowed)
        found |= set(layers[0])
    assert found == set(allowed)


def test_random_layers_are_fixed_by_the_seed_and_not_by_the_batch():
    nobody = torch.zeros(3, dtype=torch.long)
    draws = [
        trimmed(random_layers(facts(LAZY, STORED, seed), nobody, nobody, kept=KEPT))
        for seed in (3, 3, 4)
    ]
    assert draws[0] == draws[1] != draws[2]
    for row in range(3):
        only = [layer[row : row + 1] for layer in facts(LAZY, STORED, 3)]
        counts = torch.cat(random_layers(only, nobody[:1], nobody[:1], kept=KEPT))
        assert [i for i in range(8) if counts[i] < STORED[0][row]] == draws[0][row]


def test_a_half_with_fewer_layers_than_are_lazy_is_trimmed_whole():
    lazy = [[i != 0, False, False] for i in range(8)]
    nobody = torch.zeros(3, dtype=torch.long)
    counts = random_layers(facts(lazy, STORED), nobody, nobody, kept=KEPT, among="top")
    assert trimmed(counts)[0] == [4, 5, 6, 7]


def test_an_odd_layer_belongs_to_the_top_half():
    lazy, stored = [[True]] * 5, [[50]] * 5
    nobody = torch.zeros(1, dtype=torch.long)
    for among, sizes in (("bottom", [8, 8, 50, 50, 50]), ("top", [50, 50, 8, 8, 8])):
        counts = random_layers(facts(lazy, stored), nobody, nobody, kept=KEPT, among=among)
        assert torch.cat(counts).tolist() == sizes


@given(st.integers(2, 12), st.integers(9, 300), st.data())
@settings(max_examples=50, deadline=None)
def test_a_pyramid_spends_what_lazy_layers_would_leave(layers, stored, data):
    lazy = data.draw(st.lists(st.booleans(), min_size=layers, max_size=layers))
    nobody = torch.zeros(2, dtype=torch.long)
    of_layers = facts([[flag, False] for flag in lazy], [[stored, 5]] * layers)
    counts = torch.stack(pyramid_layers(of_layers, nobody, nobody, kept=KEPT))
    column = counts[:, 0].tolist()
    assert sum(column) == sum(KEPT if flag else stored for flag in lazy)
    assert column == sorted(column, reverse=True)
    assert column[-1] >= KEPT and column[0] <= stored
    assert counts[:, 1].tolist() == [5] * layers


def test_a_pyramid_falls_from_layer_to_layer():
    of_layers = facts([[i < 4] for i in range(6)], [[208]] * 6)
    nobody = torch.zeros(1, dtype=torch.long)
    # 2·200 beside the windows of 8: base 66.7, from 2·base − base/20 down to base/20.
    counts = torch.cat(pyramid_layers(of_layers, nobody, nobody, kept=KEPT)).tolist()
    assert counts == [138, 113, 87, 62, 37, 11]
