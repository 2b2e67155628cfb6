# SPDX-License-Identifier: Apache-2.0
"""Where tokens go when others are dropped, replaced or moved."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold import CompressedCache
from kvfold.cache.renumber import Renumbering
from kvfold.hf.rotation import Rotation
from kvfold.store.sequence import LogicalSequence
from tests.helpers.models import build, prompts
from tests.helpers.truth import Reader


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


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", ["", ",keys=3,values=3,correct=false", ",keys=8", ",values=2"])
@torch.no_grad()
def test_quantized_entries_before_an_edit_are_the_same_after_many(dtype, options):
    model, ids = build("llama", dtype, num_hidden_layers=2, head_dim=16), prompts((150,))[0]
    cache = CompressedCache(model, f"turboquant:residual=8,sinks=2,end_layers=0{options}")
    model(ids, past_key_values=cache)
    before = [entries.clone() for entries in cache.states[0].stored().dense()]
    for edit in range(6):
        if edit % 2:
            cache.drop((119, 121))
        else:
            cache.replace((119, 121), ids[:, 3:7])
    cache.move((110, 115), 105)
    keys, values = cache.states[0].stored().dense()
    assert keys.shape[2] == 150
    for given, found in zip(before, (keys, values), strict=True):
        assert torch.equal(found[:, :, :105], given[:, :, :105])
    # Keys turn, and values go with them as they are.
    assert torch.equal(values[:, :, 105:110], before[1][:, :, 110:115])
    assert torch.equal(values[:, :, 115:119], before[1][:, :, 115:119])
    assert not torch.equal(keys[:, :, 105:110], before[0][:, :, 110:115])


@torch.no_grad()
def test_entries_of_evicted_heads_keep_their_codes():
    """Heads of different lengths, whose padding differs."""
    model, ids = build("llama", num_hidden_layers=2, head_dim=16), prompts((150,))[0]
    quantized = "turboquant:residual=8,sinks=2,keys=3,values=3,correct=false,end_layers=0"
    cache = CompressedCache(model, f"adakv:window=8 + {quantized}", 60)
    model(ids, past_key_values=cache)
    before = entries_by_column(cache)
    for _ in range(3):
        cache.drop((118, 120))
    after = entries_by_column(cache)
    kept = [place for place in before if place[-1] < 118]
    assert len(kept) > 100 and len({sum(p[:2] == (0, h) for p in kept) for h in range(2)}) == 2
    for place in kept:
        for given, found in zip(before[place], after[place], strict=True):
            assert torch.equal(given, found)


def entries_by_column(cache):
    """Key and value of each layer, KV head and column."""
    found = {}
    for layer, state in enumerate(cache.states):
        keys, values = state.stored().dense()
        for head, columns in enumerate(state.columns()[0]):
            for slot, column in enumerate(columns.tolist()):
                if column >= 0:
                    entry = keys[0, head, slot].clone(), values[0, head, slot].clone()
                    found[layer, head, column] = entry
    return found


def test_each_layer_counts_its_own_mask_after_an_edit():
    model, (ids, mask) = build("llama"), prompts((64, 53))
    cache = kvfold.CompressedCache(model, "full")
    Reader(model, cache, mask)(ids)
    cache.drop((2, 5))
    masks = [state.sequence.valid for state in cache.states]
    assert len({each.data_ptr() for each in masks}) == len(masks)
