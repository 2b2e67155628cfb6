# SPDX-License-Identifier: Apache-2.0
"""Where stored entries came from; columns to come are written ahead, as they are consecutive."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.gather import as_added
from kvfold.store.buffer import GrowingBuffer
from kvfold.store.shared_buffer import SharedBuffer


class EntryColumns(GrowingBuffer):
    """Columns of the logical sequence, int32 `[B, H, T]`, −1 for holes.

    All the room is filled at once, so that a token that comes only makes the rows longer.
    """

    def __init__(self, rows: Tensor) -> None:
        super().__init__(rows.int())
        # In the room, slot i holds column i + offset, where it was filled.
        self._offset: int | None = None

    def follow(self, first: int, new: int) -> None:
        """Adds `new` entries to every head, in columns from `first` on."""
        end = self.length + new
        if end > self._buffer.shape[2]:
            self._put(self._copied(self.rows, end))
            self._offset = None
        if self._offset != first - self.length:
            room = self._buffer[:, :, self.length :]
            room.copy_(_from(first, room.shape[2], room))
            self._offset = first - self.length
        self.length, self.shown = end, None

    def clear(self, gone: Tensor) -> None:
        """Makes holes where `gone [B, H, ≤ T]`; what was looked at before shows what it showed."""
        buffer = self._buffer.clone()
        buffer[:, :, : gone.shape[2]].masked_fill_(gone, -1)
        self._put(buffer)

    def crop(self, count: int) -> None:
        buffer = self._buffer
        super().crop(count)
        if self._buffer is not buffer:
            self._offset = None


class HolesMask(GrowingBuffer):
    """What is added to logits `[B, H, T]`: −∞ at holes, 0 elsewhere."""

    def __init__(self, holes: Tensor, dtype: torch.dtype) -> None:
        super().__init__(as_added(holes, dtype))
        self.reserve(0)  # fills the room with 0

    def first(self, length: int) -> Tensor | None:
        """What hides the first `length` entries `[B, H, length]`; None past the room."""
        shown = self.shown
        if shown is None or shown.size(2) != length:
            if length > self._buffer.size(2):
                return None
            self.length = length
            shown = self.shown = self._buffer[:, :, :length]
        return shown

    @property
    def holes(self) -> Tensor:
        """Which entries are hidden, bool `[B, H, T]`."""
        return self.rows != 0


class SharedColumns(SharedBuffer):
    """Columns that go on from those of somebody else."""

    def follow(self, first: int, new: int) -> None:
        """Adds `new` entries to every head, in columns from `first` on."""
        columns = _from(first, new, self.trunk)
        self.append(columns.expand(*self.trunk.shape[:2], new))

    def keep_own(self, slots: Tensor) -> None:
        self.own = GrowingBuffer(self.own.rows.gather(2, slots))


def _from(first: int, count: int, like: Tensor) -> Tensor:
    return torch.arange(first, first + count, dtype=like.dtype, device=like.device)
