# SPDX-License-Identifier: Apache-2.0
"""Entries in one rectangular buffer per layer, with room to grow."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class DenseStore:
    """Keys `[B, H, T, D]`, values `[B, H, T, Dv]`, and where each entry came from.

    `positions` are columns of the logical sequence, ascending, int32 `[B, H, T]`; they are only
    held once something was evicted. Rows that keep fewer than T entries are filled up on the left
    with position −1.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.length = 0
        self._positions: Tensor | None = None
        self._keys = keys.new_empty(0)
        self._values = values.new_empty(0)
        self.append(keys, values, first=0)

    @property
    def keys(self) -> Tensor:
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        return self._values[:, :, : self.length]

    @property
    def stored_positions(self) -> Tensor | None:
        """Positions `[B, H, T]`, or None while entry i is column i."""
        return None if self._positions is None else self._positions[:, :, : self.length]

    @property
    def positions(self) -> Tensor:
        """Positions as int64 `[B, H, T]`."""
        if self._positions is not None:
            return self._positions[:, :, : self.length].long()
        batch, heads = self._keys.shape[:2]
        columns = torch.arange(self.length, device=self._keys.device)
        return columns.expand(batch, heads, self.length)

    def append(self, keys: Tensor, values: Tensor, first: int) -> None:
        """Adds new entries `[B, H, S, D]` whose columns start at `first`."""
        new, end = keys.shape[2], self.length + keys.shape[2]
        if self._keys.dim() != 4 or end > self._keys.shape[2]:
            capacity = end + slack(end)
            self._keys = self._grown(self._keys, keys, capacity)
            self._values = self._grown(self._values, values, capacity)
            if self._positions is not None:
                self._positions = self._grown(self._positions, self._positions, capacity)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        if self._positions is not None:
            columns = torch.arange(first, first + new, device=keys.device)
            self._positions[:, :, self.length : end] = columns
        self.length = end

    def _grown(self, buffer: Tensor, like: Tensor, capacity: int) -> Tensor:
        shape = (*like.shape[:2], capacity, *like.shape[3:])
        grown = torch.empty(shape, dtype=like.dtype, device=like.device)
        if buffer.dim() == like.dim():
            grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def keep(self, slots: Tensor) -> None:
        """Keeps the entries in `slots [B, H, K]`, ascending; −1 stands for a hole.

        Earlier views of the store stay intact: layers that share it may still read them.
        """
        kept = slots.shape[-1]
        capacity = kept + slack(kept)
        index = slots.clamp(min=0)
        positions = self.positions.gather(2, index).masked_fill(slots < 0, -1)
        self._keys = self._gathered(self._keys, index, capacity)
        self._values = self._gathered(self._values, index, capacity)
        self._positions = torch.empty(
            (*slots.shape[:2], capacity), dtype=torch.int32, device=slots.device
        )
        self._positions[:, :, :kept] = positions
        self.length = kept

    @staticmethod
    def _gathered(buffer: Tensor, index: Tensor, capacity: int) -> Tensor:
        size = buffer.shape[-1]
        out = torch.empty(
            (*index.shape[:2], capacity, size), dtype=buffer.dtype, device=buffer.device
        )
        wide = index[..., None].expand(*index.shape, size)
        out[:, :, : index.shape[-1]] = buffer.gather(2, wide)
        return out

    def crop(self, count: int) -> None:
        """Drops the last `count` entries."""
        self.length -= count

    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a copying selection along the batch axis, to everything stored."""
        self._keys, self._values = rows(self._keys), rows(self._values)
        if self._positions is not None:
            self._positions = rows(self._positions)

    def nbytes(self) -> tuple[int, int, int]:
        """Bytes of keys and values, of positions, and of slack."""
        buffers = (self._keys, self._values)
        capacity = self._keys.shape[2]
        whole = sum(b.numel() * b.element_size() for b in buffers)
        positions = 0
        if self._positions is not None:
            positions = self._positions.numel() * self._positions.element_size()
        used = self.length / capacity if capacity else 0.0
        kv, where = round(whole * used), round(positions * used)
        return kv, where, whole + positions - kv - where


def slack(entries: int) -> int:
    """Room for entries to come: 64, or a sixteenth of what is stored."""
    return max(64, entries // 16)
