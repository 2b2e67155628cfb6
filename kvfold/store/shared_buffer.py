# SPDX-License-Identifier: Apache-2.0
"""Fork of a buffer: a shared read-only prefix, then rows of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvfold.store.buffer import GrowingBuffer


class SharedBuffer(GrowingBuffer):
    """A shared `trunk [B, H, T, …]`, which is never written to, followed by a buffer of its own."""

    shown = None  # rows are put together anew for each look

    def __init__(self, trunk: Tensor) -> None:
        self.trunk = trunk
        self.own = GrowingBuffer(trunk[:, :, :0])

    @property
    def length(self) -> int:  # type: ignore[override]
        """Number of rows of the trunk and of its own."""
        return self.trunk.shape[2] + self.own.length

    @property
    def rows(self) -> Tensor:
        """All rows `[B, H, T, …]`, concatenated at every call."""
        return torch.cat([self.trunk, self.own.rows], 2) if self.own.length else self.trunk

    def append(self, rows: Tensor) -> Tensor:
        self.own.append(rows)
        return self.rows

    def reserve(self, room: int) -> Tensor:
        """A copy of all rows with zeros for `room` more; rows written there must be appended."""
        rows = self.rows
        return torch.cat([rows, rows.new_zeros(*rows.shape[:2], room, *rows.shape[3:])], 2)

    def crop(self, count: int) -> None:
        """Drops the last `count` rows, which must be its own."""
        self.own.crop(count)

    def keep_own(self, slots: Tensor) -> None:
        """Keeps, of its own rows `[B, H, T, D]`, those at `slots [B, H, K]`."""
        self.own = GrowingBuffer.gathered(self.own.rows, slots)

    def index(self, select: Callable[[Tensor], Tensor]) -> None:
        self.trunk = select(self.trunk)
        self.own.index(select)

    def nbytes(self) -> tuple[int, int]:
        used, room = self.own.nbytes()
        return self.trunk.numel() * self.trunk.element_size() + used, room

    def nbytes_alone(self, padding: int = 0) -> float:
        row = self.trunk[0, :, padding:]
        return row.numel() * row.element_size() + self.own.nbytes_alone()


class SharedNumbers(SharedBuffer):
    """A shared trunk of numbers `[B, H, T]`, one for each entry, followed by its own."""

    def keep_own(self, slots: Tensor) -> None:
        """Keeps, of its own numbers, those at `slots [B, H, K]`."""
        self.own = GrowingBuffer(self.own.rows.gather(2, slots))
