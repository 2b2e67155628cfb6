# SPDX-License-Identifier: Apache-2.0
"""Each row's KV head keeps its own number of entries, encoded or as they came."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvfold.kernels.gather import pick, take_flat
from kvfold.kernels.views import Flat, Named, RaggedView
from kvfold.store.base import Store
from kvfold.store.encoding import Encode, QueriedKeys
from kvfold.store.paired import Paired, Pairing, extend_pair
from kvfold.store.ragged_part import Part

# While decoding, values are encoded in lots: each lot copies what is encoded once.
LOT = 32


class RaggedStore(Store):
    """Keys, values, and the columns where they stood, one segment after the other.

    Columns are those of the last compression, int32; None while entry i is column i.
    """

    kind: ClassVar[Literal["segments"]] = "segments"
    is_dense = False

    def __init__(
        self, keys: Tensor, values: Tensor, positions: Tensor | None, slots: Tensor, encode: Encode
    ) -> None:
        """Takes entries `[B, H, T, D]` with positions `[B, H, T]`, those at `slots [B, H, K]`.

        `positions` None: entry i is column i, and all are taken.
        """
        self.rows, self.heads = keys.shape[:2]
        self.encode = encode
        self._settle(positions, slots)
        if encode.raw:
            lengths = [encode.key_count(entries, 0, decoding=False) for entries in self._counts]
            old, newest = _divided(slots, self._counts, lengths)
            flat = take_flat(keys, values, old)
            self._keys, self._values = (
                Part.begun(Flat(of_old, lengths), rows, newest)
                for of_old, rows in zip(flat, (keys, values), strict=True)
            )
        else:
            self._keys, self._values = Part(keys, slots), Part(values, slots)

    @classmethod
    def from_named(
        cls, parts: Named, heads: int, encode: Encode, new: int, first_new: int
    ) -> RaggedStore:
        """A copy of what was named; the last `new` entries are columns from `first_new` on."""
        store = cls.__new__(cls)
        store.heads, store.encode = heads, encode
        of_keys, of_values = (
            {name.removeprefix(kind): p for name, p in parts.items() if name.startswith(kind)}
            for kind in ("keys.", "values.")
        )
        store._keys = Part.from_named(of_keys, heads, encode.keys_from)
        store._values = Part.from_named(of_values, heads, encode.values_from)
        store.rows = len(store._keys.alive) // heads
        store._new, store._first_new = new, first_new
        seen = store._keys.view()
        store._counts = [seen.length(i) - new for i in range(len(seen.alive))]
        store._columns = torch.cat(parts["columns"]) if "columns" in parts else None
        return store

    def named(self) -> Named:
        """What is stored, as views."""
        parts = (
            {"columns": list(self._columns.split(self._counts))}
            if self._columns is not None
            else {}
        )
        for kind, part in (("keys", self._keys), ("values", self._values)):
            parts |= {f"{kind}.{name}": tensors for name, tensors in part.named().items()}
        return parts

    @property
    def new(self) -> tuple[int, int]:
        """How many entries came after the last compression, and the column of the first."""
        return self._new, self._first_new

    def _settle(self, positions: Tensor | None, slots: Tensor) -> None:
        self._counts = (slots >= 0).sum(-1).flatten().tolist()
        self._columns: Tensor | None = None
        if positions is not None:
            kept = positions.gather(2, slots.clamp(min=0))
            self._columns = kept[slots >= 0].int()
        self._new = self._first_new = 0

    @property
    def keys(self) -> Tensor:
        """The tail's keys `[B, H, T, D]`."""
        return self._keys.tail.rows

    @property
    def values(self) -> Tensor:
        """The tail's values `[B, H, T, Dv]`."""
        return self._values.tail.rows

    @property
    def length(self) -> int:
        """Entries of the longest segment."""
        return max(self._counts) + self._new

    def fork(self) -> RaggedStore:
        """One that goes on by itself, and shares all that is stored."""
        other = copy.copy(self)
        other._keys, other._values = self._keys.fork(), self._values.fork()
        return other

    def view(self) -> RaggedView | None:
        """What attention reads; it stays as it is when the store goes on.

        None while all that was seen is in the tail: keys and values are all there is to read.
        """
        parts = (self._keys.encoded, self._values.encoded)
        if self._columns is None and not any(any(p.lengths) for p in parts if p is not None):
            return None
        return self.segments()

    def segments(self) -> RaggedView:
        """What is stored, also while all of it is in the tail."""
        return RaggedView(self._keys.view(), self._values.view(), self._new)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, T, D]`, decoded, shorter segments filled up on the left."""
        return self._keys.rectangle(self.length), self._values.rectangle(self.length)

    @property
    def positions(self) -> Tensor:
        """Columns of the entries `[B, H, T]` int64, −1 where a shorter segment is filled up."""
        device, length = self.keys.device, self.length
        out = torch.full((len(self._counts), length), -1, device=device)
        out[:, length - self._new :] = torch.arange(
            self._first_new, self._first_new + self._new, device=device
        )
        old = length - self._new
        if self._columns is None:
            out[:, :old] = torch.arange(old, device=device)
        else:
            for row, part in zip(out, self._columns.split(self._counts), strict=True):
                row[old - len(part) : old] = part
        return out.unflatten(0, (self.rows, self.heads))

    @property
    def pairs(self) -> bool:
        """Whether entries are shared with another layer's."""
        return self.encode.pairs

    @property
    def fixed(self) -> Tensor | None:
        """Entries `[B, H, T]` of which the key or the value is encoded; None where all are raw."""
        if self.encode.raw:
            return None
        views = (self._keys.view(), self._values.view())
        lengths = [views[0].length(i) for i in range(len(self._counts))]
        oldest = [max(length - view.alive[i] for view in views) for i, length in enumerate(lengths)]
        first = self.length - torch.tensor(lengths, device=self.keys.device)[:, None]
        slot = torch.arange(self.length, device=self.keys.device)
        last = first + torch.tensor(oldest, device=self.keys.device)[:, None]
        return ((slot >= first) & (slot < last)).unflatten(0, (self.rows, self.heads))

    def append(self, keys: Tensor, values: Tensor, first: int) -> tuple[Tensor, Tensor]:
        stored = self._keys.append(keys), self._values.append(values)
        if self._new == 0:
            self._first_new = first
        self._new += keys.shape[2]
        return stored

    def keep(self, slots: Tensor) -> None:
        """Keeps the entries at `slots [B, H, K]`, −1 for holes, all that is encoded among them."""
        length = self.length
        complete = self._columns is None and slots.shape[-1] == length and bool((slots >= 0).all())
        positions = None if complete else self.positions
        self._keys.keep(slots, length)
        self._values.keep(slots, length)
        self._settle(positions, slots)

    @property
    def own(self) -> int:
        """Entries of each head that came after what is shared."""
        return self._keys.own

    def keep_own(self, slots: Tensor) -> None:
        """Keeps, of the entries after those that are shared, those at `slots [B, H, K]`."""
        shared, own = self.positions.split([self.length - self.own, self.own], -1)
        columns = torch.cat([shared, own.gather(2, slots)], -1)
        self._keys.keep_own(slots)
        self._values.keep_own(slots)
        every = torch.arange(columns.shape[-1], device=slots.device).expand_as(columns)
        self._settle(columns, every.masked_fill(columns < 0, -1))

    def due(self, decoding: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values `[n, D]` of each segment that are to be encoded now."""

        def value_count(entries: int, encoded: int) -> int:
            count = self.encode.value_count(entries, encoded, decoding)
            in_lots = decoding and not self.encode.pairs  # pairs bring their own blocks
            return count - (count - encoded) % LOT if in_lots else count

        def key_count(entries: int, encoded: int) -> int:
            return self.encode.key_count(entries, encoded, decoding)

        return self._keys.due(key_count), self._values.due(value_count)

    def encode_due(self, decoding: bool, seen: QueriedKeys | None = None) -> bool:
        """Encodes what is due; at a turn's end with what its attention saw. Whether any was."""
        keys, values = self.due(decoding)
        first = self._keys.encoded is None
        if first or any(map(len, keys)):
            self._keys.accept(self.encode.keys(keys, seen, self._keys.encoded))
        if first or any(map(len, values)):
            self._values.accept(self.encode.values(values))
        return any(map(len, keys + values))

    def encode_with(self, second: RaggedStore, decoding: bool) -> bool:
        """Encodes what is due here and in the other layer of the pair. Whether any was."""
        assert isinstance(self.encode, Pairing)
        mine, theirs = self.due(decoding), second.due(decoding)
        parts = ((self._keys, second._keys), (self._values, second._values))
        for (own, other), rows, others in zip(parts, mine, theirs, strict=True):
            if own.encoded is not None and not any(map(len, rows)):
                continue
            both = self.encode.pair(rows, others)
            if isinstance(own.encoded, Paired) and isinstance(other.encoded, Paired):
                both = extend_pair(own.encoded, other.encoded, *both)
            own.become(both[0])
            other.become(both[1])
        return any(len(rows) for of_part in mine for rows in of_part)

    def share_with(self, first: RaggedStore) -> None:
        """Makes this second layer of a pair share memory with the first again, after a copy."""
        for own, other in ((self._keys, first._keys), (self._values, first._values)):
            assert isinstance(own.encoded, Paired) and isinstance(other.encoded, Paired)
            own.encoded = replace(own.encoded, shared=other.encoded.shared)

    def crop(self, count: int) -> None:
        """Drops the last `count` entries, all of them new."""
        self._new -= count
        self._keys.crop(count)
        self._values.crop(count)

    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a copying selection along the batch axis, to everything stored."""
        order = rows(torch.arange(self.rows, device=self.keys.device)).tolist()
        segments = [row * self.heads + head for row in order for head in range(self.heads)]
        self._keys.index(rows, segments)
        self._values.index(rows, segments)
        if self._columns is not None:
            parts = self._columns.split(self._counts)
            self._columns = torch.cat([parts[i] for i in segments])
        self._counts = [self._counts[i] for i in segments]
        self.rows = len(order)

    def nbytes(self, counted: set[int]) -> tuple[int, int, int]:
        """Bytes of keys and values, of positions, of slack; tensors in `counted` were counted."""
        stored = slack = 0
        for part in (self._keys, self._values):
            used, room = part.tail.nbytes()
            entry = part.tail.rows.shape[-1] * part.tail.rows.element_size()
            alive = sum(part.alive) * entry
            stored, slack = stored + alive, slack + room + used - alive
        for tensor in self._encoded_tensors():
            if tensor.data_ptr() not in counted:
                stored += tensor.numel() * tensor.element_size()
                counted.add(tensor.data_ptr())
        positions = 0 if self._columns is None else 4 * self._columns.numel()
        return stored, positions, slack

    def _encoded_tensors(self) -> list[Tensor]:
        parts = (self._keys.encoded, self._values.encoded)
        return [tensor for part in parts if part is not None for tensor in part.tensors()]


def _divided(slots: Tensor, counts: list[int], old: list[int]) -> tuple[Tensor, Tensor]:
    """Slots `[B, H, K]`, holes on the left, of each segment's oldest entries and of the others.

    Segment i has `counts[i]` entries, of which `old[i]` go into the first part.
    """
    width = slots.shape[-1]
    new = torch.tensor([n - m for n, m in zip(counts, old, strict=True)], device=slots.device)
    new = new.view(*slots.shape[:2], 1)
    place = torch.arange(width, device=slots.device)
    newest = slots.masked_fill(place < width - new, -1)
    # Moved to the right, where the newest ones were.
    before = place - new
    oldest = pick(slots, before, -1)
    return oldest, newest
