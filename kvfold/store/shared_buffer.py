# SPDX-License-Identifier: Apache-2.0
"""Rows that go on from rows of somebody else's, which are shared and stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvfold.store.buffer import GrowingBuffer


class SharedBuffer(GrowingBuffer):
    """`trunk [B, H, T, …]`, which is never written to, and rows of its own after it."""

    shown = None  # rows are put together anew for each look

    def __init__(self, trunk: Tensor) -> None:
        self.trunk = trunk
        self.own = GrowingBuffer(trunk[:, :, :0])

    @property
    def length(self) -> int:  # type: ignore[override]
        """Rows of the trunk and of its own."""
        return self.trunk.shape[2] + self.own.length

    @property
    def rows(self) -> Tensor:
        """All of them `[B, H, T, …]`, put together for as long as they are looked at."""
        return torch.cat([self.trunk, self.own.rows], 2) if self.own.length else self.trunk

    def append(self, rows: Tensor) -> Tensor:
        self.own.append(rows)
        return self.rows

    def reserve(self, room: int) -> Tensor:
        """A copy of all rows, and `room` for more: what is written there is to be appended."""
        rows = self.rows
        more = rows.new_zeros(*rows.shape[:2], room, *rows.shape[3:])
        return torch.cat([rows, more], 2)

    def crop(self, count: int) -> None:
        """Drops the last `count`, which must be its own."""
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
