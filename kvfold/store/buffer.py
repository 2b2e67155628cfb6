# SPDX-License-Identifier: Apache-2.0
"""A growing buffer: a tensor with room along its third axis, so that appends rarely copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.gather import take

ROOM = 12  # least number of free slots after a copy


class GrowingBuffer:
    """A tensor `rows [B, H, T, …]` that grows along T, with room for more."""

    def __init__(self, rows: Tensor, room: int = ROOM) -> None:
        self.length = rows.shape[2]
        self.room = room
        self._put(self._copied(rows))

    @classmethod
    def gathered(cls, rows: Tensor, slots: Tensor, room: int = ROOM) -> GrowingBuffer:
        """A buffer of the entries of `rows [B, H, T, D]` at `slots [B, H, K]`."""
        grown = cls.__new__(cls)
        grown.length, grown.room = slots.shape[-1], room
        room = grown._capacity(grown.length) - grown.length
        # The room is gathered too (from slot 0), so that one copy does all.
        grown._put(take(rows, F.pad(slots, (0, room))))
        return grown

    def _put(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self.shown: Tensor | None = None  # `rows`, once they were asked for

    @property
    def rows(self) -> Tensor:
        """Stored rows `[B, H, T, …]`, as a view."""
        # Read several times per step, and each new view takes a microsecond.
        if self.shown is None:
            self.shown = self._buffer[:, :, : self.length]
        return self.shown

    def append(self, rows: Tensor) -> Tensor:
        """Appends `rows [B, H, S, …]`; returns all stored rows `[B, H, T, …]`.

        Raises KvfoldError outside `torch.inference_mode()` if the buffer was made inside of it.
        """
        end = self.length + rows.shape[2]
        if self._buffer.is_inference() and not torch.is_inference_mode_enabled():
            raise KvfoldError(
                "entries stored inside torch.inference_mode() cannot be added to outside of it: "
                "go on inside it, or fill caches under torch.no_grad()"
            )
        if end > self._buffer.shape[2]:
            self._put(self._copied(self.rows, end))
        # A step takes a slice less, unless both are views of one storage, which torch refuses then.
        if end == self.length + 1 and (
            rows.untyped_storage()._cdata != self._buffer.untyped_storage()._cdata
        ):
            self._buffer.index_copy_(2, _index(self.length, rows.device), rows)
        else:
            self._buffer[:, :, self.length : end] = rows
        self.length = end
        self.shown = shown = self._buffer[:, :, :end]
        return shown

    def reserve(self, room: int) -> Tensor:
        """The whole buffer `[B, H, ≥ T + room, …]`, zero after the stored rows."""
        old, end = self._buffer, self.length + room
        if end > old.shape[2]:
            self._put(old.new_empty(*old.shape[:2], end, *old.shape[3:]))
            self._buffer[:, :, : self.length] = old[:, :, : self.length]
        self._buffer[:, :, self.length :] = 0
        return self._buffer

    def crop(self, count: int) -> None:
        """Drops the last `count` rows; copies if more than twice the usual room is left."""
        self.length -= count
        self.shown = None
        usual = self._capacity(self.length) - self.length
        if self._buffer.shape[2] > self.length + 2 * usual:
            self._put(self._copied(self.rows))

    def index(self, select: Callable[[Tensor], Tensor]) -> None:
        """Applies `select`, a copying selection along the batch axis."""
        self._put(select(self._buffer))

    def nbytes(self) -> tuple[int, int]:
        """Bytes of the stored rows, and of the room."""
        whole = self._buffer.numel() * self._buffer.element_size()
        used = whole // self._buffer.shape[2] * self.length if whole else 0
        return used, whole - used

    def nbytes_alone(self, padding: int = 0) -> float:
        """Bytes of one row of the batch without `padding` of its stored rows, if it were alone.

        Its room is smaller by as much as the usual room of so many rows.
        """
        own, slots = self.length - padding, self._buffer.shape[2]
        usual = slack(own, self.room) / slack(self.length, self.room)
        each = self._buffer.numel() * self._buffer.element_size() / len(self._buffer) / slots
        return each * (own + (slots - self.length) * usual)

    def _copied(self, rows: Tensor, end: int | None = None) -> Tensor:
        end = rows.shape[2] if end is None else end
        shape = (*rows.shape[:2], self._capacity(end), *rows.shape[3:])
        buffer = torch.empty(shape, dtype=rows.dtype, device=rows.device)
        buffer[:, :, : rows.shape[2]] = rows
        return buffer

    def _capacity(self, end: int) -> int:
        return end + slack(end, self.room)


@lru_cache(maxsize=64)  # layers and buffers of one length share it
def _index(slot: int, device: torch.device) -> Tensor:
    """The `slot` as an index `[1]`."""
    return torch.full((1,), slot, device=device)


def slack(entries: int, least: int = ROOM) -> int:
    """Free slots after a copy: 1/64 of the stored entries, but at least `least`."""
    return max(least, entries // 64)
