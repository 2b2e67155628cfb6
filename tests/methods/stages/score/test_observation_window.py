# SPDX-License-Identifier: Apache-2.0
"""Scores against naive attention in float64, one query at a time; padding changes nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold import KvfoldError
from kvfold.methods.stages.score.observation_window import mean_votes, pool, window_votes
from tests.helpers.observations import alone, mean_of_groups, naive_rows, observe

GROUPS = pytest.mark.parametrize("groups", [1, 2, 4])
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def naive_pool(scores, kernel, pooling):
    """1-D pooling of a list: what lies outside counts as nothing."""
    near = [scores[max(0, i - kernel // 2) : i + kernel // 2 + 1] for i in range(len(scores))]
    return [max(part) if pooling == "max" else sum(part) / kernel for part in near]


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


@pytest.mark.slow
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


@pytest.mark.parametrize("pool_first", [False, True])
def test_mean_votes_are_sums_divided_by_the_queries_of_each_row(pool_first):
    seen = observe([40, 31, 9, 5, 1], window=8)
    sums = window_votes(seen, 8, 5, "max", pool_first)
    for row, queries in enumerate([8, 8, 8, 5, 1]):
        mean = mean_votes(seen, 8, 5, "max", pool_first)[row]
        torch.testing.assert_close(mean, sums[row] / queries, **CLOSE)


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


def test_attention_rows_know_softcap_and_sink_logits():
    sink_logits = torch.tensor([0.3, -1.0, 2.0, 0.0])
    seen = observe([20], softcap=1.5, sink_logits=sink_logits)
    expected = naive_rows(seen, softcap=1.5, sink_logits=sink_logits.tolist())
    torch.testing.assert_close(seen.window_attention(8)[0], expected.float(), **CLOSE)


def test_rows_of_padding_attend_to_nothing():
    seen = observe([20, 3])
    rows = seen.window_attention(8)[1]
    assert rows[:, :5].eq(0).all()
    assert rows[:, :, :17].eq(0).all()
    torch.testing.assert_close(rows[:, 5:].sum(-1), torch.ones(4, 3), **CLOSE)
