# SPDX-License-Identifier: Apache-2.0
"""Scores against naive attention in float64, one query at a time; padding changes nothing."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold import KvfoldError
from kvfold.methods.observation import Observation
from kvfold.methods.stages.score.accumulated_attention import accumulated_attention
from kvfold.methods.stages.score.key_norm import negative_norm
from kvfold.methods.stages.score.last_query import newest_row
from kvfold.methods.stages.score.observation_window import pool, window_votes
from kvfold.methods.stages.score.position import recency, uniform_noise
from tests.helpers.observations import alone, mean_of_groups, naive_rows, observe

GROUPS = pytest.mark.parametrize("groups", [1, 2, 4])
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def naive_pool(scores, kernel, pooling):
    """1-D pooling of a list: what lies outside counts as nothing."""
    near = [scores[max(0, i - kernel // 2) : i + kernel // 2 + 1] for i in range(len(scores))]
    return [max(part) if pooling == "max" else sum(part) / kernel for part in near]


# --- pooling -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "pooling", "expected"),
    [
        (3, "avg", [0.333333, 0.333333, 2.666667, 2.666667, 2.666667, 0.666667, 0.666667]),
        (3, "max", [1, 1, 8, 8, 8, 2, 2]),
        (5, "avg", [0.2, 1.8, 1.8, 1.6, 2, 2, 0.4]),
        (1, "avg", [1, 0, 0, 8, 0, 0, 2]),
        (1, "max", [1, 0, 0, 8, 0, 0, 2]),
    ],
)
def test_pooling_golden_vectors(kernel, pooling, expected):
    scores = torch.tensor([[[1.0, 0, 0, 8, 0, 0, 2]]])
    assert pool(scores, kernel, pooling).flatten().tolist() == pytest.approx(expected, abs=1e-6)


@given(
    st.lists(st.integers(-9, 9), min_size=1, max_size=15),
    st.sampled_from([1, 3, 5, 7, 29, 101]),
    st.sampled_from(["max", "avg"]),
)
@settings(max_examples=50, deadline=None)
def test_pooling_is_the_naive_loop(scores, kernel, pooling):
    pooled = pool(torch.tensor([[scores]]).float(), kernel, pooling)[0, 0]
    torch.testing.assert_close(pooled, torch.tensor(naive_pool(scores, kernel, pooling)).float())


@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_padding_pools_as_if_it_lay_outside(pooling):
    scores = torch.tensor([[[99.0, 99.0, -1.0, -5.0, -2.0, -7.0]]])
    padding = torch.tensor([[[True, True, False, False, False, False]]])
    pooled = pool(scores, 3, pooling, padding)[..., 2:]
    torch.testing.assert_close(pooled, pool(scores[..., 2:], 3, pooling))


@pytest.mark.parametrize("kernel", [0, 2, 4, -1])
def test_a_kernel_without_a_centre_is_refused(kernel):
    with pytest.raises(KvfoldError, match="odd and positive"):
        pool(torch.zeros(1, 1, 9), kernel, "max")


# --- window votes ------------------------------------------------------------------------------


@GROUPS
@pytest.mark.parametrize("kernel", [1, 5])
@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("pool_first", [False, True])
def test_votes_are_naive_sums_of_the_last_rows(groups, kernel, pooling, pool_first):
    window, length = 8, 33
    seen = observe([length], groups=groups, window=window)
    votes = naive_rows(seen).sum(1)[:, :-window]
    if not pool_first:
        votes = mean_of_groups(votes, groups)
    votes = torch.tensor([naive_pool(row, kernel, pooling) for row in votes.tolist()])
    if pool_first:
        votes = mean_of_groups(votes, groups)
    expected = torch.cat([votes, torch.zeros(2, window)], 1)
    got = window_votes(seen, window, kernel, pooling, pool_first)
    assert got.shape == (1, 2, length)
    torch.testing.assert_close(got[0], expected.float(), **CLOSE)


def test_a_window_smaller_than_what_was_remembered_takes_the_newest_queries():
    seen = observe([30], window=12)
    expected = mean_of_groups(naive_rows(seen)[:, -4:].sum(1), 2)
    expected[:, -4:] = 0
    torch.testing.assert_close(window_votes(seen, 4, 1, "max")[0], expected.float(), **CLOSE)


def test_fewer_queries_than_the_window_vote_for_what_is_before_it():
    seen = observe([30], window=3)
    expected = mean_of_groups(naive_rows(seen).sum(1), 2)
    expected[:, -8:] = 0
    torch.testing.assert_close(window_votes(seen, 8, 1, "max")[0], expected.float(), **CLOSE)


@GROUPS
@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("pool_first", [False, True])
def test_a_padded_row_votes_as_it_does_alone(groups, pooling, pool_first):
    lengths = [40, 31, 9, 5, 1]
    seen = observe(lengths, groups=groups)
    votes = window_votes(seen, 8, 5, pooling, pool_first)
    for row, length in enumerate(lengths):
        by_itself = window_votes(alone(seen, row, length), 8, 5, pooling, pool_first)
        torch.testing.assert_close(votes[row, :, -length:], by_itself[0], **CLOSE)
        assert votes[row, :, -length:].isfinite().all()


def test_attention_rows_know_softcap_and_sinks():
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0])
    seen = observe([20], softcap=1.5, sinks=sinks)
    expected = naive_rows(seen, softcap=1.5, sinks=sinks.tolist())
    torch.testing.assert_close(seen.window_attention(8)[0], expected.float(), **CLOSE)


def test_rows_of_padding_attend_to_nothing():
    seen = observe([20, 3])
    rows = seen.window_attention(8)[1]
    assert rows[:, :5].eq(0).all()
    assert rows[:, :, :17].eq(0).all()
    torch.testing.assert_close(rows[:, 5:].sum(-1), torch.ones(4, 3), **CLOSE)


# --- the newest row ----------------------------------------------------------------------------


@GROUPS
def test_the_newest_row_is_the_last_query_s_attention(groups):
    seen = observe([25], groups=groups, window=4)
    row = naive_rows(seen)[:, -1]
    per_head = mean_of_groups(row, groups)
    torch.testing.assert_close(newest_row(seen, per_head=True)[0], per_head.float(), **CLOSE)
    shared = (row.sum(0) / len(row)).expand(2, -1)
    torch.testing.assert_close(newest_row(seen, per_head=False)[0], shared.float(), **CLOSE)


@pytest.mark.parametrize("per_head", [False, True])
def test_the_newest_row_of_a_padded_row_is_its_own(per_head):
    lengths = [25, 11, 1]
    seen = observe(lengths)
    rows = newest_row(seen, per_head)
    for row, length in enumerate(lengths):
        by_itself = newest_row(alone(seen, row, length), per_head)
        torch.testing.assert_close(rows[row, :, -length:], by_itself[0], **CLOSE)
        assert rows[row, :, : 25 - length].eq(0).all()


# --- keys, positions, noise --------------------------------------------------------------------


def test_a_key_scores_minus_its_length():
    seen = observe([12, 7])
    for row, head, slot in [(0, 0, 0), (0, 1, 11), (1, 0, 6), (1, 1, 2)]:
        length = math.sqrt(sum(x * x for x in seen.keys[row, head, slot].tolist()))
        assert negative_norm(seen)[row, head, slot].item() == pytest.approx(-length, rel=1e-6)


def test_key_lengths_are_computed_in_float32():
    keys = torch.full((1, 1, 1, 4), 40_000.0, dtype=torch.float16)
    seen = Observation(keys, keys, torch.zeros(1, 1, 1, dtype=torch.long))
    assert negative_norm(seen).item() == pytest.approx(-80_000, rel=1e-3)


def test_recency_ranks_by_position():
    order = recency(observe([6, 4])).argsort(-1, descending=True)
    assert order[0].tolist() == [[5, 4, 3, 2, 1, 0]] * 2
    assert order[1, :, :4].tolist() == [[5, 4, 3, 2]] * 2


def test_noise_is_fixed_by_its_seed():
    first, again, other = (uniform_noise(observe([60], seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0, 0], first[0, 1])
    assert first.shape == (1, 2, 60)


def test_the_noise_of_a_padded_row_is_its_own():
    seen = observe([5, 9, 1], seed=3)
    noise = uniform_noise(seen)
    for row, length in enumerate([5, 9, 1]):
        by_itself = uniform_noise(alone(seen, row, length))
        assert torch.equal(noise[row, :, -length:], by_itself[0])


def test_padding_goes_first_and_takes_everything_along():
    seen = observe([6, 6], column_sums=torch.rand(2, 2, 6))
    gap = torch.tensor([0, 1, -1, -1, 2, 3]).expand(2, 2, 6)
    moved, order = dataclasses.replace(seen, positions=gap).padding_first()
    assert order[0, 0].tolist() == [2, 3, 0, 1, 4, 5]
    assert moved.positions[1, 1].tolist() == [-1, -1, 0, 1, 2, 3]
    for name in ("keys", "values", "column_sums"):
        assert torch.equal(getattr(moved, name), getattr(seen, name)[:, :, order[0, 0]])
    assert seen.padding_first() == (seen, None)


def test_noise_is_uniform():
    noise = uniform_noise(observe([5000]))
    assert noise.min() >= 0 and noise.max() < 1
    share = torch.histc(noise, bins=10, min=0, max=1) / noise.numel()
    assert (share - 0.1).abs().max() < 0.015


# --- accumulated attention ---------------------------------------------------------------------


@GROUPS
def test_accumulated_attention_is_divided_by_the_queries_that_could_see(groups):
    length = 21
    whole = observe([length], groups=groups, window=length)
    sums = mean_of_groups(naive_rows(whole).sum(1), groups)[None]
    seen = Observation(whole.keys, whole.values, whole.positions, column_sums=sums)
    assert torch.equal(accumulated_attention(seen, per_visible_query=False), sums)
    means = accumulated_attention(seen, per_visible_query=True)
    for column in range(length):
        could_see = sum(1 for query in range(length) if query >= column)
        torch.testing.assert_close(means[..., column], sums[..., column] / could_see)


def test_visible_queries_are_counted_from_positions_not_from_slots():
    positions = torch.tensor([[[-1, 3, 7, 9]], [[0, 1, 8, 9]]])
    sums = torch.tensor([[[0.0, 14.0, 6.0, 1.0]], [[20.0, 9.0, 4.0, 3.0]]])
    keys = torch.zeros(2, 1, 4, 2)
    means = accumulated_attention(Observation(keys, keys, positions, column_sums=sums), True)
    assert means.tolist() == [[[0.0, 2.0, 2.0, 1.0]], [[2.0, 1.0, 2.0, 3.0]]]
