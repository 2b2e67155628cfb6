# SPDX-License-Identifier: Apache-2.0
"""Accumulated attention, divided by the queries that could see an entry."""

import pytest
import torch

from kvfold.methods.observation import Observation
from kvfold.methods.stages.score.accumulated_attention import accumulated_attention
from kvfold.observers.column_sums import ColumnSums
from tests.helpers.observations import mean_of_groups, naive_rows, observe

GROUPS = pytest.mark.parametrize("groups", [1, 2, 4])


@GROUPS
def test_accumulated_attention_is_divided_by_the_queries_that_could_see(groups):
    length = 21
    whole = observe([length], groups=groups, window=length)
    sums = mean_of_groups(naive_rows(whole).sum(1), groups)[None]
    seen = Observation(whole.keys, whole.values, whole.positions, observed={ColumnSums: sums})
    assert torch.equal(accumulated_attention(seen, per_visible_query=False), sums)
    means = accumulated_attention(seen, per_visible_query=True)
    for column in range(length):
        could_see = sum(1 for query in range(length) if query >= column)
        torch.testing.assert_close(means[..., column], sums[..., column] / could_see)


def test_visible_queries_are_counted_from_positions_not_from_slots():
    positions = torch.tensor([[[-1, 3, 7, 9]], [[0, 1, 8, 9]]])
    sums = torch.tensor([[[0.0, 14.0, 6.0, 1.0]], [[20.0, 9.0, 4.0, 3.0]]])
    keys = torch.zeros(2, 1, 4, 2)
    means = accumulated_attention(
        Observation(keys, keys, positions, observed={ColumnSums: sums}), True
    )
    assert means.tolist() == [[[0.0, 2.0, 2.0, 1.0]], [[2.0, 1.0, 2.0, 3.0]]]
