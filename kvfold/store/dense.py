# SPDX-License-Identifier: Apache-2.0
"""Entries in one rectangular buffer per layer, with room to grow."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvfold.kernels.gather import pick
from kvfold.kernels.views import Named
from kvfold.store.base import Store
from kvfold.store.buffer import ROOM, GrowingBuffer, slack
from kvfold.store.entry_columns import EntryColumns, HolesMask, SharedColumns
from kvfold.store.entry_norms import On, norms_of
from kvfold.store.shared_buffer import SharedBuffer


class DenseStore(Store):
    """Keys `[B, H, T, D]`, values `[B, H, T, Dv]`, and where each entry came from.

    `positions` are columns of the logical sequence, ascending, int32 `[B, H, T]`; they are only
    held once something was evicted. Rows that keep fewer than T entries are filled up on the left
    with position −1. While decoding, an entry that leaves keeps its place, with position −1 too:
    `dead` counts these, one per head each, until the next copy leaves them out. `holes`: whether
    any position is −1.
    """

    kind: ClassVar[Literal["dense"]] = "dense"
    is_dense = True

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = GrowingBuffer(keys), GrowingBuffer(values)
        self._positions: EntryColumns | SharedColumns | None = None
        self._hidden: HolesMask | None = None  # made when it is first asked for
        self._norms: GrowingBuffer | None = None  # as well
        self._marked = True  # whether positions tell what has left
        self.dead, self.holes = 0, False

    @classmethod
    def from_named(cls, parts: Named, heads: int, dead: int) -> DenseStore:
        """A copy of what was named, of which `dead` entries of each head are gone."""
        tensors = {
            n: torch.stack(of_heads).unflatten(0, (-1, heads)) for n, of_heads in parts.items()
        }
        store = cls(tensors["keys"], tensors["values"])
        if "positions" in tensors:
            store._positions = EntryColumns(tensors["positions"])
            store.holes = bool((tensors["positions"] < 0).any())
        store.dead = dead
        return store

    def named(self) -> Named:
        """What is stored, as views, by name: one tensor for each row's KV head."""
        tensors = {"keys": self.keys, "values": self.values, "positions": self.stored_positions}
        return {n: list(rows.flatten(0, 1)) for n, rows in tensors.items() if rows is not None}

    @property
    def length(self) -> int:
        """Entries of the longest row."""
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
    def stored_positions(self) -> Tensor | None:
        """Positions `[B, H, T]`, or None while entry i is column i."""
        self._mark()
        return self.origins

    @property
    def origins(self) -> Tensor | None:
        """As `stored_positions`, where what has left since the last copy keeps its own."""
        return None if self._positions is None else self._positions.rows

    @property
    def moved(self) -> bool:
        """Whether entry i may be another column than i."""
        return self._positions is not None

    @property
    def positions(self) -> Tensor:
        """Positions as int64 `[B, H, T]`."""
        stored = self.stored_positions
        if stored is not None:
            return stored.long()
        batch, heads = self.keys.shape[:2]
        return torch.arange(self.length, device=self.keys.device).expand(batch, heads, -1)

    @property
    def hidden(self) -> Tensor | None:
        """0, and −∞ at holes `[B, H, T]`, to be added to logits; None where there are no holes."""
        return self._hiding() if self.holes else None

    def entries(self, of: On) -> Tensor:
        """The keys or the values `[B, H, T, D]`."""
        return self.keys if of == "keys" else self.values

    def norms(self, of: On, newest: Tensor) -> Tensor:
        """Norms `[B, H, T]` of the keys or of the values, float32, with the `newest [B, H, 1]`.

        They are kept, since to read all entries again takes longer: ask for one of both only.
        """
        if self._norms is None or self._norms.length != self.length - 1:
            self._norms = GrowingBuffer(norms_of(self.entries(of)))
        else:
            self._norms.append(newest)
        return self._norms.rows

    def _hiding(self) -> Tensor:
        """0, and −∞ at holes `[B, H, T]`; made anew where there is no more room behind."""
        if self._hidden is not None:
            shown = self._hidden.first(self._keys.length)
            if shown is not None:
                return shown
        self._hidden = HolesMask(self.positions < 0, self.keys.dtype)
        return self._hidden.rows

    def _mark(self) -> None:
        """Writes into the positions what has left: in a step that is not worth its time."""
        if not self._marked:
            assert isinstance(self._positions, EntryColumns) and self._hidden is not None
            self._positions.clear(self._hidden.holes)
            self._marked = True

    def _forget(self) -> None:
        """What was made of the entries no longer belongs to them."""
        self._mark()
        self._hidden = self._norms = None

    def fork(self) -> DenseStore:
        """One that goes on by itself, and shares all that is stored."""
        self._mark()
        other = copy.copy(self)
        other._hidden = other._norms = None
        other._keys, other._values = SharedBuffer(self.keys), SharedBuffer(self.values)
        if self._positions is not None:
            other._positions = SharedColumns(self._positions.rows)
        return other

    def view(self) -> Tensor | None:
        """What attention must know beside keys and values: the stored positions."""
        return self.stored_positions

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, T, D]`."""
        return self.keys, self.values

    def append(self, keys: Tensor, values: Tensor, first: int) -> tuple[Tensor, Tensor]:
        stored = self._keys.append(keys), self._values.append(values)
        if self._positions is not None:
            self._positions.follow(first, keys.shape[2])
        return stored

    def reserve(self, room: int) -> tuple[Tensor, Tensor]:
        """Buffers of keys and values with `room` for more entries: write there, then append."""
        return self._keys.reserve(room), self._values.reserve(room)

    def drop(self, slot: Tensor) -> None:
        """Marks one entry of each head, at `slot [B, H, 1]`, as gone; nothing is moved."""
        if not isinstance(self._positions, EntryColumns):
            self._positions = EntryColumns(self.positions)
        # In the buffer that the view belongs to.
        self._hiding().scatter_(2, slot, -torch.inf)
        self._marked = False
        self.dead, self.holes = self.dead + 1, True

    @property
    def crowded(self) -> bool:
        """Whether so much is dead that a copy without it is due."""
        return self.dead >= ROOM and self.dead >= slack(self.length - self.dead)

    def change(
        self, slot: Tensor, keys: Tensor, values: Tensor, norms: Tensor | None = None
    ) -> None:
        """Puts keys `[B, H, 1, D]` and values `[B, H, 1, Dv]` in the place of those at `slot`.

        norms `[B, H, 1]` are those of what was asked for before; None: all are forgotten.
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
        """Keeps the entries in `slots [B, H, K]`, ascending; −1 stands for a hole.

        Earlier views of the store stay intact: layers that share it may still read them.
        """
        positions = pick(self.positions, slots, -1)
        self._positions = EntryColumns(positions)
        self._keys = GrowingBuffer.gathered(self.keys, slots)
        self._values = GrowingBuffer.gathered(self.values, slots)
        self._forget()
        self.dead, self.holes = 0, bool((positions < 0).any())

    @property
    def own(self) -> int:
        """Entries of each head that came after what is shared."""
        return self._keys.own.length if isinstance(self._keys, SharedBuffer) else 0

    def keep_own(self, slots: Tensor) -> None:
        """Keeps, of the entries after those that are shared, those at `slots [B, H, K]`."""
        assert isinstance(self._keys, SharedBuffer) and isinstance(self._values, SharedBuffer)
        shared = self.length - self.own
        if not isinstance(self._positions, SharedColumns):
            columns = self.positions.int()
            self._positions = SharedColumns(columns[:, :, :shared])
            self._positions.append(columns[:, :, shared:])
        for part in (self._keys, self._values, self._positions):
            part.keep_own(slots)
        self._forget()

    def place(self, columns: Tensor) -> None:
        """Says where each entry stands: `columns [B, H or 1, T]`, ascending, −1 for holes."""
        self._forget()
        self._positions = EntryColumns(columns.expand(*self.keys.shape[:2], -1))
        self.holes = bool((columns < 0).any())

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Puts `keys` and `values` `[B, H, T, D]` in the place of those stored."""
        self.keys.copy_(keys)
        self.values.copy_(values)
        self._norms = None

    def crop(self, count: int) -> None:
        """Drops the last `count` entries."""
        self._forget()
        for part in self._parts():
            part.crop(count)

    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a copying selection along the batch axis, to everything stored."""
        self._forget()
        for part in self._parts():
            part.index(rows)

    def nbytes(self, counted: set[int]) -> tuple[int, int, int]:
        """Bytes of keys and values, of what lies beside, and of slack; `counted` stays as it is."""
        keys, values = self._keys.nbytes(), self._values.nbytes()
        beside = (self._positions, self._hidden, self._norms)
        of_each = [part.nbytes() for part in beside if part is not None]
        where = [sum(each) for each in zip(*of_each, strict=True)] or [0, 0]
        dead = (keys[0] + values[0]) // max(1, self.length) * self.dead
        return keys[0] + values[0] - dead, where[0], keys[1] + values[1] + where[1] + dead

    def _parts(self) -> list[GrowingBuffer]:
        return [p for p in (self._keys, self._values, self._positions) if p is not None]
