# SPDX-License-Identifier: Apache-2.0
"""The dense store against a model of plain python lists."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import KvfoldError
from kvfold.store.dense import DenseStore
from kvfold.store.encoding import Encode
from kvfold.store.ragged import RaggedStore

HOLE = (-1, None)


class Lists:
    """What a store should hold: per row and head a list of (position, number of the entry)."""

    def __init__(self, batch, heads):
        self.rows = [[[] for _ in range(heads)] for _ in range(batch)]
        self.seen = self.made = 0

    def append(self, new):
        """Adds `new` entries; returns their keys and values, all different."""
        batch, heads = len(self.rows), len(self.rows[0])
        numbers = torch.arange(self.made, self.made + batch * heads * new).view(batch, heads, new)
        self.made += numbers.numel()
        for row, of_row in enumerate(numbers.tolist()):
            for head, of_head in enumerate(of_row):
                self.rows[row][head] += list(enumerate(of_head, self.seen))
        self.seen += new
        return entries(numbers)

    def keep(self, slots):
        for row, of_row in enumerate(slots):
            for head, of_head in enumerate(of_row):
                old = self.rows[row][head]
                self.rows[row][head] = [old[slot] if slot >= 0 else HOLE for slot in of_head]

    def crop(self, count):
        self.rows = [[head[: len(head) - count] for head in row] for row in self.rows]
        self.seen -= count

    def index(self, rows):
        self.rows = [[list(head) for head in self.rows[row]] for row in rows]


def entries(numbers):
    """Keys `[B, H, S, 2]` and values `[B, H, S, 3]` that tell which entry they belong to."""
    key = numbers[..., None].float()
    return torch.cat([key, -key], -1), torch.cat([key + 0.5, -key, 2 * key], -1).double()


def assert_holds(store, lists):
    length = len(lists.rows[0][0])
    positions = [[[p for p, _ in head] for head in row] for row in lists.rows]
    assert store.length == length
    assert store.columns.tolist() == positions
    assert store.columns.dtype == torch.int64
    if store.stored_columns is not None:
        assert store.stored_columns.tolist() == positions
        assert store.stored_columns.dtype == torch.int32
    numbers = torch.tensor([[[n or 0 for _, n in head] for head in row] for row in lists.rows])
    real = store.columns >= 0
    keys, values = entries(numbers.long().view(store.columns.shape))
    assert torch.equal(store.keys[real], keys[real])
    assert torch.equal(store.values[real], values[real])
    assert sum(store.nbytes(set())) == real_bytes(store)
    assert store.holes or bool(real.all())


def real_bytes(store):
    tensors = [store.keys, store.values, store.stored_columns]
    return sum(t.untyped_storage().nbytes() for t in tensors if t is not None)


def filled(tokens, batch=2, heads=2):
    lists = Lists(batch, heads)
    return DenseStore(*lists.append(tokens)), lists


def random_slots(lists, kept, rng):
    """Ascending slots for each head; rows that keep fewer than `kept` have holes on the left."""
    stored = range(len(lists.rows[0][0]))
    slots = []
    for row in lists.rows:
        count = rng.randint(0, kept)
        holes = [-1] * (kept - count)
        slots.append([holes + sorted(rng.sample(stored, count)) for _ in row])
    return slots


@given(
    st.lists(st.sampled_from(["append", "append", "keep", "crop", "index"]), max_size=12),
    st.randoms(use_true_random=False),
)
@settings(max_examples=50, deadline=None)
def test_a_store_is_a_list_per_head(operations, rng):
    store, lists = filled(rng.randint(1, 90), rng.randint(1, 3), rng.randint(1, 3))
    assert_holds(store, lists)
    recent = lists.seen
    for operation in operations:
        stored = len(lists.rows[0][0])
        if operation == "append":
            first, new = lists.seen, rng.choice([1, 1, 2, 70])
            store.append(*lists.append(new), first=first)
            recent += new
        elif operation == "keep":
            slots = random_slots(lists, rng.randint(0, stored), rng)
            store.keep(torch.tensor(slots, dtype=torch.long).view(*store.keys.shape[:2], -1))
            lists.keep(slots)
            recent = 0
        elif operation == "crop":
            # Only what came after the last eviction can be taken back.
            count = rng.randint(0, recent)
            store.crop(count)
            lists.crop(count)
            recent -= count
        else:
            rows = [rng.randrange(len(lists.rows)) for _ in range(rng.randint(1, 3))]
            store.index(lambda x, rows=rows: x.index_select(0, torch.tensor(rows)))
            lists.index(rows)
        assert_holds(store, lists)


def test_keeping_twice_remembers_the_first_positions():
    store, lists = filled(6, batch=1, heads=1)
    for slots in ([[[1, 3, 4, 5]]], [[[-1, 0, 2]]], [[[1, 2]]]):
        store.keep(torch.tensor(slots))
        lists.keep(slots)
        assert_holds(store, lists)
    assert store.columns.tolist() == [[[1, 4]]]


def test_a_hole_that_is_kept_stays_one():
    store, _ = filled(6, batch=1, heads=1)
    store.keep(torch.tensor([[[-1, 0, 2]]]))
    store.keep(torch.tensor([[[0, 2]]]))
    assert store.holes and store.columns.tolist() == [[[-1, 2]]]


def test_an_emptied_store_fills_again():
    store, lists = filled(5)
    nothing = torch.empty(2, 2, 0, dtype=torch.long)
    store.keep(nothing)
    lists.keep(nothing.tolist())
    assert_holds(store, lists)
    store.append(*lists.append(3), first=5)
    assert_holds(store, lists)
    assert store.columns[0, 0].tolist() == [5, 6, 7]


@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("tokens", [1, 100, 3200])
def test_appending_within_the_slack_moves_nothing(tokens, evicted):
    store, lists = filled(tokens + 1, batch=1)
    if evicted:
        slots = torch.arange(1, tokens + 1).expand(1, 2, -1)
        store.keep(slots)
        lists.keep(slots.tolist())
    at, size = store.keys.data_ptr(), real_bytes(store)
    room = max(12, (tokens if evicted else tokens + 1) // 64)
    for _ in range(room):
        store.append(*lists.append(1), first=lists.seen - 1)
    assert store.keys.data_ptr() == at
    assert real_bytes(store) == size
    assert_holds(store, lists)
    store.append(*lists.append(1), first=lists.seen - 1)
    assert real_bytes(store) > size
    assert_holds(store, lists)


def test_positions_are_held_only_once_something_was_evicted():
    store, _ = filled(10)
    assert store.stored_columns is None
    assert store.columns.tolist() == [[list(range(10))] * 2] * 2
    assert store.nbytes(set())[1] == 0
    store.keep(torch.tensor([2, 5, 9]).expand(2, 2, 3))
    assert store.stored_columns.tolist() == [[[2, 5, 9]] * 2] * 2
    assert store.nbytes(set())[1] == 2 * 2 * 3 * 4


def test_bytes_are_those_of_the_entries_and_the_slack():
    store, _ = filled(100)
    entry = 2 * 4 + 3 * 8  # two float32 of a key, three float64 of a value
    assert store.nbytes(set()) == (2 * 2 * 100 * entry, 0, 2 * 2 * 12 * entry)
    store.keep(torch.arange(7).expand(2, 2, 7))
    assert store.nbytes(set()) == (2 * 2 * 7 * entry, 2 * 2 * 7 * 4, 2 * 2 * 12 * (entry + 4))
    store.crop(3)
    assert store.nbytes(set()) == (2 * 2 * 4 * entry, 2 * 2 * 4 * 4, 2 * 2 * 15 * (entry + 4))


def test_eviction_gives_memory_back():
    store, _ = filled(2000)
    before = real_bytes(store)
    store.keep(torch.arange(100).expand(2, 2, 100))
    assert real_bytes(store) < before / 10


def test_earlier_views_survive_eviction():
    store, lists = filled(50)
    keys, values = store.keys, store.values
    before = keys.clone(), values.clone()
    store.keep(torch.arange(20, 50).expand(2, 2, 30))
    store.append(*lists.append(40), first=50)
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])


def test_what_was_handed_in_is_copied():
    keys, values = torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2)
    store = DenseStore(keys, values)
    keys.zero_(), values.zero_()
    assert store.keys.eq(1).all() and store.values.eq(1).all()


@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
def test_an_append_that_is_refused_leaves_the_store_as_it_was(ragged):
    with torch.inference_mode():
        keys = torch.arange(2.0 * 6 * 4).view(1, 2, 6, 4)
        slots = torch.tensor([[[0, 2, 5], [1, 3, 4]]])
        store = DenseStore(keys, keys)
        columns = store.columns
        if ragged:
            store = RaggedStore(keys, keys, columns, slots, Encode())
        else:
            store.keep(slots)
    before = store.columns.clone(), [part.clone() for part in store.dense()]
    with torch.no_grad(), pytest.raises(KvfoldError, match="inference_mode"):
        store.append(keys[:, :, :1].clone(), keys[:, :, :1].clone(), first=6)
    assert torch.equal(store.columns, before[0]) and store.length == before[0].shape[2]
    assert all(torch.equal(a, b) for a, b in zip(store.dense(), before[1], strict=True))
