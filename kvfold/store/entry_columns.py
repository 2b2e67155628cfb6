# SPDX-License-Identifier: Apache-2.0
"""Columns of stored entries. New columns are consecutive, so the buffer's room holds them ahead."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.gather import as_added
from kvfold.store.buffer import GrowingBuffer
from kvfold.store.shared_buffer import SharedNumbers


class EntryColumns(GrowingBuffer):
    """Columns of entries, int32 `[B, H, T]`, −1 for holes.

    The room holds the columns to come, so that a new token only changes the length.
    """

    def __init__(self, rows: Tensor) -> None:
        super().__init__(rows.int())
        # Slot i of the room holds column i + offset; None: the room is not filled.
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
        """Sets columns to −1 where `gone [B, H, ≤ T]`; earlier views stay valid."""
        buffer = self._buffer.clone()
        buffer[:, :, : gone.shape[2]].masked_fill_(gone, -1)
        self._put(buffer)

    def crop(self, count: int) -> None:
        buffer = self._buffer
        super().crop(count)
        if self._buffer is not buffer:
            self._offset = None


class HolesMask(GrowingBuffer):
    """Additive mask `[B, H, T]`: −∞ at holes, 0 elsewhere."""

    def __init__(self, holes: Tensor, dtype: torch.dtype) -> None:
        super().__init__(as_added(holes, dtype))
        self.reserve(0)  # fills the room with 0

    def first(self, length: int) -> Tensor:
        """Mask of the first `length` slots `[B, H, length]`, of which new ones are no holes."""
        if length > self._buffer.size(2):
            self._put(self._copied(self.rows, length))
            self.reserve(0)
        self.length = length
        self.shown = shown = self._buffer[:, :, :length]
        return shown

    @property
    def holes(self) -> Tensor:
        """Bool mask `[B, H, T]` of the holes."""
        return self.rows != 0


class SharedColumns(SharedNumbers):
    """Columns of a fork: a shared read-only prefix, then its own, int32 `[B, H, T]`."""

    def follow(self, first: int, new: int) -> None:
        """Adds `new` entries to every head, in columns from `first` on."""
        self.append(_from(first, new, self.trunk).expand(*self.trunk.shape[:2], new))


def _from(first: int, count: int, like: Tensor) -> Tensor:
    return torch.arange(first, first + count, dtype=like.dtype, device=like.device)
