# SPDX-License-Identifier: Apache-2.0
"""`DenseStore`: a layer's entries in one rectangular buffer, with room to grow."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvfold.kernels.gather import pick
from kvfold.kernels.views import BiasedColumns, Named
from kvfold.store.base import Store
from kvfold.store.buffer import ROOM, GrowingBuffer, slack
from kvfold.store.entry_columns import EntryColumns, HolesMask, SharedColumns
from kvfold.store.entry_norms import norms_of
from kvfold.store.shared_buffer import SharedBuffer, SharedNumbers


class DenseStore(Store):
    """Keys `[B, H, T, D]`, values `[B, H, T, Dv]`, and the column of each entry.

    `columns [B, H, T]` ascend; stored as int32 from the first eviction on.
    Rows that keep fewer than T entries are padded on the left with column −1. An entry that is
    evicted while decoding becomes a hole: its slot stays, with column −1. `dead` counts such slots
    per head, until the next copy drops them. `holes` is true if any column is −1.
    """

    kind: ClassVar[Literal["dense"]] = "dense"
    is_dense = True

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = GrowingBuffer(keys), GrowingBuffer(values)
        self._columns: EntryColumns | SharedColumns | None = None
        self._hidden: HolesMask | None = None  # made at first use
        self._norms: GrowingBuffer | None = None  # made at first use
        self._bias: GrowingBuffer | None = None  # [B, H, T], float32
        self._marked = True  # False while evicted entries still have their columns in `_columns`
        self.dead, self.holes = 0, False

    @classmethod
    def sharing(cls, keys: Tensor, values: Tensor) -> DenseStore:
        """A store of someone else's entries, which it neither copies nor writes to."""
        store = cls(keys[:, :, :0], values[:, :, :0])
        store._keys, store._values = SharedBuffer(keys), SharedBuffer(values)
        return store

    @classmethod
    def from_named(cls, parts: Named, heads: int, dead: int) -> DenseStore:
        """Copy from the tensors of `named`; `dead` slots of each head are holes."""
        tensors = {
            n: torch.stack(of_heads).unflatten(0, (-1, heads)) for n, of_heads in parts.items()
        }
        store = cls(tensors["keys"], tensors["values"])
        if "positions" in tensors:
            store._columns = EntryColumns(tensors["positions"])
            store.holes = bool((tensors["positions"] < 0).any())
        if "bias" in tensors:
            store.set_bias(tensors["bias"])
        store.dead = dead
        return store

    def named(self) -> Named:
        """Keys, values, columns and bias by name, as views, one for each row's KV head."""
        tensors = {"keys": self.keys, "values": self.values, "positions": self.stored_columns}
        tensors["bias"] = self.bias
        return {n: list(rows.flatten(0, 1)) for n, rows in tensors.items() if rows is not None}

    @property
    def length(self) -> int:
        """Slots T of every head, holes included."""
        return self._keys.length

    @property
    def keys(self) -> Tensor:
        shown = self._keys.shown  # in a step, a property less
        return self._keys.rows if shown is None else shown

    @property
    def values(self) -> Tensor:
        shown = self._values.shown
        return self._values.rows if shown is None else shown

    @property
    def stored_columns(self) -> Tensor | None:
        """Columns `[B, H, T]`, int32, −1 for holes; None while slot i is column i."""
        self._mark()
        return None if self._columns is None else self._columns.rows

    @property
    def shows_all(self) -> bool:
        """True if entries were evicted, and all that are left count, without a bias."""
        return self._columns is not None and not self.holes and not self.biased

    @property
    def columns(self) -> Tensor:
        """Columns `[B, H, T]`, int64, −1 for holes."""
        stored = self.stored_columns
        if stored is not None:
            return stored.long()
        batch, heads = self.keys.shape[:2]
        return torch.arange(self.length, device=self.keys.device).expand(batch, heads, -1)

    @property
    def bias(self) -> Tensor | None:
        return None if self._bias is None else self._bias.rows

    def set_bias(self, bias: Tensor) -> None:
        self._bias, self.biased = GrowingBuffer(bias.float()), True

    @property
    def hidden(self) -> Tensor | None:
        """Additive mask `[B, H, T]`: −∞ at holes, 0 elsewhere; None if there are no holes."""
        if not self.holes:
            return None
        if self._hidden is None:
            self._hidden = HolesMask(self.columns < 0, self.keys.dtype)
        # Read three times in a step: only the first time is the shown part too short.
        shown, length = self._hidden.shown, self._keys.length
        same = shown is not None and shown.size(2) == length
        return shown if same else self._hidden.first(length)

    def norms(self, entries: Tensor, newest: Tensor) -> Tensor:
        """Norms `[B, H, T]` of keys or values, float32, of which `newest [B, H, 1]` is the last.

        Norms are stored between steps, as computing them reads all entries `[B, H, T, D]`. A store
        serves either keys or values: call with the same ones always.
        """
        if self._norms is None or self._norms.length != self._keys.length - 1:
            self._norms = GrowingBuffer(norms_of(entries))
            return self._norms.rows
        return self._norms.append(newest)

    def _mark(self) -> None:
        """Sets the columns of new holes to −1; deferred, as a decode step does not need it."""
        if not self._marked:
            assert isinstance(self._columns, EntryColumns) and self._hidden is not None
            self._columns.clear(self._hidden.holes)
            self._marked = True

    def _forget(self) -> None:
        """Drops the mask and the norms, which no longer match the entries."""
        self._mark()
        self._hidden = self._norms = None

    def fork(self) -> DenseStore:
        """A store that shares all present entries and grows by itself."""
        self._mark()
        other = copy.copy(self)
        other._hidden = other._norms = None
        other._keys, other._values = SharedBuffer(self.keys), SharedBuffer(self.values)
        if self._columns is not None:
            other._columns = SharedColumns(self._columns.rows)
        if self._bias is not None:
            other._bias = SharedNumbers(self._bias.rows)
        return other

    def unshare(self) -> None:
        if isinstance(self._keys, SharedBuffer):
            self._keys, self._values = GrowingBuffer(self.keys), GrowingBuffer(self.values)
        if isinstance(self._columns, SharedColumns):
            self._columns = EntryColumns(self._columns.rows)
        if isinstance(self._bias, SharedBuffer):
            self.set_bias(self._bias.rows)

    def view(self) -> Tensor | BiasedColumns | None:
        """Columns `[B, H, T]`, int32, for attention's mask; None while slot i is column i."""
        columns = self.stored_columns
        return columns if self._bias is None else BiasedColumns(columns, self._bias.rows)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys `[B, H, T, D]` and values `[B, H, T, Dv]`, not copied."""
        return self.keys, self.values

    def append(self, keys: Tensor, values: Tensor, first: int) -> tuple[Tensor, Tensor]:
        stored = self._keys.append(keys), self._values.append(values)
        if self._columns is not None:
            self._columns.follow(first, keys.shape[2])
        if self._bias is not None:
            self._bias.append(self._bias.rows.new_zeros(keys.shape[:3]))
        return stored

    def reserve(self, room: int) -> tuple[Tensor, Tensor]:
        """Buffers of keys and values with room for `room` entries: write there, then append."""
        return self._keys.reserve(room), self._values.reserve(room)

    def drop(self, slot: Tensor) -> Tensor:
        """Evicts one entry of each head, at `slot [B, H, 1]`: a hole, nothing is moved.

        Returns the mask `hidden` with it.
        """
        if not isinstance(self._columns, EntryColumns):
            self._columns = EntryColumns(self.columns)
        self.dead, self.holes = self.dead + 1, True
        hidden = self.hidden
        assert hidden is not None
        self._marked = False
        return hidden.scatter_(2, slot, -torch.inf)  # through the view, into the mask's buffer

    @property
    def crowded(self) -> bool:
        """True if so many slots are dead that a copy without them is due."""
        return self.dead >= ROOM and self.dead >= slack(self._keys.length - self.dead)

    def change(
        self, slot: Tensor, keys: Tensor, values: Tensor, norms: Tensor | None = None
    ) -> None:
        """Overwrites the entries at `slot [B, H, 1]`: keys `[B, H, 1, D]`, values `[B, H, 1, Dv]`.

        norms `[B, H, 1]` are the new entry's, of what `norms` stores; None: all norms are dropped.
        """
        index = slot[..., None].expand_as(keys)
        self.keys.scatter_(2, index, keys)
        same = keys.shape == values.shape
        self.values.scatter_(2, index if same else slot[..., None].expand_as(values), values)
        if norms is None:
            self._norms = None
        elif self._norms is not None:
            self._norms.rows.scatter_(2, slot, norms)

    def keep(self, slots: Tensor) -> None:
        """Evicts all entries but those at `slots [B, H, K]`, ascending, −1 for holes.

        Earlier views stay valid: layers that share this cache may still read them.
        """
        if self.own_length:
            self._keep_own(slots[..., self.length - self.own_length :])
            return
        columns = pick(self.columns, slots, -1)
        self._columns = EntryColumns(columns)
        self._keys = GrowingBuffer.gathered(self.keys, slots)
        self._values = GrowingBuffer.gathered(self.values, slots)
        if self._bias is not None:
            self.set_bias(pick(self._bias.rows, slots, 0))
        self._forget()
        self.dead, self.holes = 0, bool((columns < 0).any())

    @property
    def own_length(self) -> int:
        return self._keys.own.length if isinstance(self._keys, SharedBuffer) else 0

    def _keep_own(self, slots: Tensor) -> None:
        shared = self.length - self.own_length
        if not isinstance(self._columns, SharedColumns):
            columns = self.columns.int()
            self._columns = SharedColumns(columns[:, :, :shared])
            self._columns.append(columns[:, :, shared:])
        for part in self._parts():
            assert isinstance(part, SharedBuffer)
            part.keep_own(slots - shared)
        self._forget()

    def place(self, columns: Tensor) -> None:
        """Sets the column of each entry: `columns [B, H or 1, T]`, ascending, −1 for holes."""
        self._forget()
        self._columns = EntryColumns(columns.expand(*self.keys.shape[:2], -1))
        self.holes = bool((columns < 0).any())

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Overwrites all entries with keys `[B, H, T, D]` and values `[B, H, T, Dv]`, in place."""
        self.keys.copy_(keys)
        self.values.copy_(values)
        self._norms = None

    def crop(self, count: int) -> None:
        """Drops the last `count` entries of every head."""
        self._forget()
        for part in self._parts():
            part.crop(count)

    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a copying selection along the batch axis, to all tensors."""
        self._forget()
        for part in self._parts():
            part.index(rows)

    def nbytes(self, counted: set[int]) -> tuple[int, int, int]:
        """Bytes of keys and values, of all else, and of slack; ignores `counted`."""
        keys, values = self._keys.nbytes(), self._values.nbytes()
        beside = (self._columns, self._hidden, self._norms, self._bias)
        of_each = [part.nbytes() for part in beside if part is not None]
        where = [sum(each) for each in zip(*of_each, strict=True)] or [0, 0]
        dead = (keys[0] + values[0]) // max(1, self.length) * self.dead
        return keys[0] + values[0] - dead, where[0], keys[1] + values[1] + where[1] + dead

    def nbytes_per_row(
        self, kept: Sequence[Sequence[int]], whole: Sequence[bool], counted: set[int]
    ) -> list[float]:
        """Bytes of each row as if it were alone; ignores `counted`."""
        hidden = self._hidden if self.dead else None  # only evicted entries hide in a row alone
        every = (self._keys, self._values, self._norms, self._bias, hidden)
        always = [part for part in every if part is not None]
        moved = always if self._columns is None else [*always, self._columns]
        padding = [self.length - self.dead - max(of_heads) for of_heads in kept]
        return [
            sum(part.nbytes_alone(empty) for part in (always if untouched else moved))
            for empty, untouched in zip(padding, whole, strict=True)
        ]

    def _parts(self) -> list[GrowingBuffer]:
        parts = (self._keys, self._values, self._columns, self._bias)
        return [part for part in parts if part is not None]
