# SPDX-License-Identifier: Apache-2.0
"""RoCo: mean attention against naive loops, and who is protected from eviction."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.methods.observation import Observation
from kvfold.methods.roco import low_mean_unless_unstable
from kvfold.methods.stages.select.top import top
from kvfold.observers.column_sums import ColumnSquares, ColumnSums
from tests.helpers.observations import alone, mean_of_groups, naive_rows, observe

GROUPS = pytest.mark.parametrize("groups", [1, 4, 8])


def attended(rows, positions, seen, budget):
    """From group-mean attention rows `[H, queries, T]`, 0 where a query could not see."""
    keys = torch.zeros(1, *positions.shape, 2)
    return Observation(
        keys,
        keys,
        positions[None],
        observed={ColumnSums: rows.sum(1)[None], ColumnSquares: rows.square().sum(1)[None]},
        tokens_seen=torch.tensor([seen]),
        budget=torch.tensor([budget]),
    )


def test_roco_golden_vector():
    rows = torch.tensor([[[1, 0, 0], [0.5, 0.5, 0], [0.2, 0.5, 0.3]]])
    places = torch.arange(3)[None]
    # Without a place to protect anything, scores are the means.
    means = low_mean_unless_unstable(attended(rows, places, 3, budget=0))
    assert means.flatten().tolist() == pytest.approx([0.566667, 0.5, 0.3], abs=1e-6)
    # One place, for the one whose deviation is not 0.
    scores = low_mean_unless_unstable(attended(rows, places, 3, budget=2), protect_recent=0)
    assert scores.flatten().tolist() == pytest.approx([2.329983, 0.5, 0.3], abs=1e-5)


# --- naive loops -------------------------------------------------------------------------------


def naive_moments(rows, first_seen):
    """Means and deviations of one head: rows `[queries][T]`, the query each entry came with."""
    means, deviations = [], []
    for entry, start in enumerate(first_seen):
        received = [row[entry] for row in rows[start:]]
        mean = sum(received) / len(received)
        square = sum(a * a for a in received) / len(received)
        means.append(mean)
        deviations.append(math.sqrt(max(0.0, square - mean * mean)))
    return means, deviations


def naive_protected(deviations, budget, recent, ratio):
    """The r + 1 entries of highest deviation, the last `recent` before all others."""
    stored = len(deviations)
    order = sorted(
        range(stored),
        key=lambda j: (0, -j) if j >= stored - recent else (1, -deviations[j], j),
    )
    return set(order[: min(int(budget * ratio) + 1, budget)])


def naive_evicted(rows, budget, recent, ratio):
    """The official step: of the k − r entries of smallest deviation the one of lowest mean."""
    means, deviations = naive_moments(rows, range(budget + 1))
    deviations[budget + 1 - recent :] = [1e9] * recent
    feasible = sorted(range(budget + 1), key=lambda j: deviations[j])
    feasible = feasible[: budget - int(budget * ratio)]
    return min(feasible, key=lambda j: means[j])


def moments_of(lengths, groups, budgets):
    """Random queries over whole rows: the observation, and each row's group-mean attention."""
    seen = observe(lengths, groups=groups, window=max(lengths))
    rows = [
        mean_of_groups(naive_rows(alone(seen, row, n)), groups) for row, n in enumerate(lengths)
    ]
    longest = max(lengths)
    sums = torch.zeros(len(lengths), 2, longest)
    squares = torch.zeros_like(sums)
    for row, (length, attention) in enumerate(zip(lengths, rows, strict=True)):
        sums[row, :, -length:] = attention.sum(1)
        squares[row, :, -length:] = attention.square().sum(1)
    seen = dataclasses.replace(
        seen,
        observed={ColumnSums: sums, ColumnSquares: squares},
        tokens_seen=torch.tensor(lengths),
        budget=torch.tensor(budgets),
    )
    return seen, rows


@GROUPS
@pytest.mark.parametrize(("lengths", "budgets"), [([34], [14]), ([34, 21, 6], [14, 20, 3])])
@pytest.mark.parametrize(("recent", "ratio"), [(10, 0.3), (2, 0.5), (0, 0.0)])
def test_scores_are_the_naive_means_and_protection(groups, lengths, budgets, recent, ratio):
    seen, rows = moments_of(lengths, groups, budgets)
    scores = low_mean_unless_unstable(seen, protect_recent=recent, protect_std_ratio=ratio)
    for row, (length, budget) in enumerate(zip(lengths, budgets, strict=True)):
        for head, attention in enumerate(rows[row].tolist()):
            means, deviations = naive_moments(attention, range(length))
            protected = naive_protected(deviations, budget, recent, ratio)
            got = scores[row, head, -length:].tolist()
            assert {j for j in range(length) if got[j] > 1} == protected
            for j in set(range(length)) - protected:
                assert got[j] == pytest.approx(means[j], rel=1e-4)


@GROUPS
@pytest.mark.parametrize("budget", [33, 40])
def test_one_entry_too_many_is_evicted_by_the_official_rule(groups, budget):
    seen, rows = moments_of([budget + 1], groups, [budget])
    scores = low_mean_unless_unstable(seen)
    for head, attention in enumerate(rows[0].tolist()):
        evicted = naive_evicted(attention, budget, 10, 0.3)
        assert int(scores[0, head].argmin()) == evicted
        assert evicted < budget + 1 - 10


def test_protection_decides_who_goes():
    # Entry 1 has the lowest mean but the least stable attention; entry 2 goes instead.
    rows = torch.tensor(
        [
            [1.0, 0, 0, 0],
            [0.9, 0.1, 0, 0],
            [0.8, 0.0, 0.2, 0],
            [0.3, 0.3, 0.2, 0.2],
        ]
    )[None]
    seen = attended(rows, torch.arange(4)[None], 4, budget=3)
    naive = naive_moments(rows[0].tolist(), range(4))[0]
    assert naive.index(min(naive)) == 1
    for ratio, evicted in ((0.0, 1), (0.4, 2)):
        scores = low_mean_unless_unstable(seen, protect_recent=0, protect_std_ratio=ratio)
        assert int(scores.flatten().argmin()) == evicted


# --- invariants --------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    st.integers(1, 30), st.integers(1, 40), st.integers(0, 12), st.floats(0, 1), st.integers(0, 99)
)
@settings(max_examples=50, deadline=None)
def test_what_is_protected_is_kept_and_the_rest_by_mean(stored, budget, recent, ratio, seed):
    budget = min(budget, stored)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(1, stored, stored, generator=generator).tril()
    rows = rows / rows.sum(-1, keepdim=True)
    seen = attended(rows, torch.arange(stored)[None], stored, budget)
    scores = low_mean_unless_unstable(seen, protect_recent=recent, protect_std_ratio=ratio)
    kept = set(top(scores, torch.tensor([budget])).flatten().tolist())
    means, deviations = naive_moments(rows[0].tolist(), range(stored))
    protected = naive_protected(deviations, budget, recent, ratio)
    assert protected <= kept and len(kept) == budget
    rest = set(range(stored)) - kept
    assert all(means[j] >= means[i] - 1e-5 for j in kept - protected for i in rest)


def test_queries_are_counted_from_the_entry_s_position():
    # Stored 0, 2 and 4 of 5 seen: 5, 3 and 1 queries could see them.
    keys = torch.zeros(1, 1, 3, 2)
    seen = Observation(
        keys,
        keys,
        torch.tensor([[[0, 2, 4]]]),
        observed={
            ColumnSums: torch.tensor([[[2.5, 0.6, 0.4]]]),
            ColumnSquares: torch.tensor([[[2.5, 0.12, 0.16]]]),
        },
        tokens_seen=torch.tensor([5]),
        budget=torch.tensor([0]),
    )
    scores = low_mean_unless_unstable(seen)
    assert scores.flatten().tolist() == pytest.approx([0.5, 0.2, 0.4])


def test_constant_attention_does_not_deviate():
    # In float32 the variance of a constant comes out below 0 for some of these.
    value = torch.linspace(0.001, 0.999, 500)
    places = torch.zeros(1, 1, 500, dtype=torch.long)
    keys = torch.zeros(1, 1, 500, 2)
    seen = Observation(
        keys,
        keys,
        places,
        observed={
            ColumnSums: (7 * value)[None, None],
            ColumnSquares: (7 * value.square())[None, None],
        },
        tokens_seen=torch.tensor([7]),
        budget=torch.tensor([500]),
    )
    variance = seen.column_squares / 7 - (seen.column_sums / 7).square()
    assert (variance < 0).any()
    scores = low_mean_unless_unstable(seen, protect_recent=0, protect_std_ratio=1.0)
    assert scores.isfinite().all()
    assert (scores - 2).abs().max() < 1e-3


def test_with_few_places_the_newest_of_the_recent_hold_them():
    rows = torch.ones(1, 8, 8).tril() / torch.arange(1, 9)[:, None]
    seen = attended(rows, torch.arange(8)[None], 8, budget=7)
    scores = low_mean_unless_unstable(seen).flatten()
    assert [j for j in range(8) if scores[j] > 1] == [5, 6, 7]


def test_padding_is_never_protected():
    # Constant attention: nothing deviates, and the earlier of equals is protected.
    places = torch.tensor([[[-1, -1, 0, 1, 2, 3, 4]]])
    queries = torch.where(places < 0, 0, 5 - places)
    keys = torch.zeros(1, 1, 7, 2)
    seen = Observation(
        keys,
        keys,
        places,
        observed={ColumnSums: queries * 0.5, ColumnSquares: queries * 0.25},
        tokens_seen=torch.tensor([5]),
        budget=torch.tensor([4]),
    )
    scores = low_mean_unless_unstable(seen, protect_recent=1, protect_std_ratio=0.5)
    assert scores.flatten().tolist() == [0.0, 0.0, 2.0, 2.0, 0.5, 0.5, 3.0]
