# SPDX-License-Identifier: Apache-2.0
"""Where tokens go when others are dropped, replaced or moved."""

from __future__ import annotations

import pytest
import torch

from kvfold.cache.renumber import Renumbering
from kvfold.cache.sequence import LogicalSequence
from kvfold.hf.rotation import Rotation
from tests.helpers.models import build


def test_dropped_tokens_leave_no_gap():
    by = Renumbering.of_replaced(LogicalSequence(6), 1, 2, 4, 0)
    assert by.columns.tolist() == [[0, 1, -1, -1, 2, 3]]
    assert by.shifts.tolist() == [[0, 0, 0, 0, -2, -2]]
    assert by.counts == (0, 1, 2, 2, 2, 3, 4) and by.sequence.seen == 4
    assert by.ids(torch.tensor([[5, 6, 7, 8, 9, 10]])).tolist() == [[5, 6, 9, 10]]


def test_replaced_tokens_leave_room_for_the_new_ones():
    by = Renumbering.of_replaced(LogicalSequence(5), 1, 1, 2, 3)
    assert by.columns.tolist() == [[0, -1, 4, 5, 6]]
    assert by.shifts.tolist() == [[0, 0, 2, 2, 2]]
    assert by.counts == (0, 1, 4, 5, 6, 7)
    ids, new = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[1, 2, 3]])
    assert by.ids(ids, new, 1).tolist() == [[5, 1, 2, 3, 7, 8, 9]]
    # Ids that are not known end what is known.
    assert by.ids(ids[:, :3], new, 1).tolist() == [[5, 1, 2, 3, 7]]
    assert by.ids(ids).tolist() == [[5]]


def test_rows_drop_the_same_tokens_from_their_own_columns():
    valid = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]).bool()
    by = Renumbering.of_replaced(LogicalSequence(6, valid), 2, 1, 3, 0)
    assert by.columns.tolist() == [[0, -1, -1, 1, 2, 3], [0, 1, 2, -1, -1, 3]]
    assert by.shifts.tolist() == [[0, 0, 0, -2, -2, -2], [0, 0, 0, 0, 0, -2]]
    assert by.sequence.valid.tolist() == [[True] * 4, [False, False, True, True]]


def test_two_drops_are_one_renumbering():
    valid = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]).bool()
    first = Renumbering.of_replaced(LogicalSequence(6, valid), 2, 2, 3, 0)
    both = first.then(Renumbering.of_replaced(first.sequence, 2, 0, 1, 0))
    assert both.columns.tolist() == [[-1, 0, -1, 1, 2, 3], [0, 1, -1, 2, -1, 3]]
    assert both.shifts.tolist() == [[0, -1, 0, -2, -2, -2], [0, 0, 0, -1, 0, -2]]
    assert both.tokens.tolist() == [-1, 0, -1, 1, 2, 3] and both.later == -2
    assert both.spans((0, 8)) == [(0, 4), (4, 6)]
    assert both.sequence.valid.tolist() == [[True] * 4, [False, False, True, True]]


def test_tokens_put_at_the_end_follow_all_others():
    by = Renumbering.of_replaced(LogicalSequence(3), 1, 3, 3, 2)
    assert by.columns.tolist() == [[0, 1, 2]] and by.sequence.seen == 5
    assert by.counts == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("to", "order"), [(0, [2, 3, 0, 1, 4, 5]), (5, [0, 1, 4, 2, 3, 5]), (6, [0, 1, 4, 5, 2, 3])]
)
def test_moved_tokens_change_places_with_those_between(to, order):
    by = Renumbering.of_moved(1, 6, 2, 4, to)
    assert by.ids(torch.arange(6)[None]).tolist() == [order]
    assert by.columns[0].tolist() == [order.index(i) for i in range(6)]


def test_spans_and_first_tokens_follow_their_tokens():
    dropped = Renumbering.of_replaced(LogicalSequence(10), 1, 2, 5, 0)
    assert dropped.spans((1, 3)) == [(1, 2)] and dropped.spans((2, 5)) == []
    assert dropped.spans((4, 12)) == [(2, 7), (7, 9)]  # tokens 10 and 11 are still to come
    assert [dropped.first_tokens(count) for count in (1, 3, 6)] == [1, 2, 3]
    replaced = Renumbering.of_replaced(LogicalSequence(10), 1, 2, 5, 4)
    assert replaced.spans((1, 7)) == [(1, 2), (6, 8)] and replaced.first_tokens(7) == 2
    assert replaced.spans((9, 14)) == [(10, 11), (11, 15)]
    at_end = Renumbering.of_replaced(LogicalSequence(10), 1, 8, 10, 5)
    assert at_end.spans((12, 10**12)) == [(15, 10**12 + 3)]
    moved = Renumbering.of_moved(1, 10, 2, 4, 0)
    assert moved.spans((1, 3)) == [(0, 1), (3, 4)] and moved.first_tokens(3) == 1


def test_a_key_is_moved_by_its_angle():
    """A key of four channels at position 5, moved to 2; frequencies 1 and 0.01."""
    model = build("llama", torch.float32, head_dim=4)
    rotate = Rotation(model, 0)
    key = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    at = rotate(key, torch.tensor([5]))
    expected = torch.tensor([3.160435, 1.797584, -0.107938, 4.094959])
    assert torch.allclose(at.flatten(), expected, atol=1e-5)
    moved = rotate(at, torch.tensor([-3])).flatten()
    expected = torch.tensor([-3.144039, 1.919605, -0.339143, 4.039197])
    assert torch.allclose(moved, expected, atol=1e-5)
