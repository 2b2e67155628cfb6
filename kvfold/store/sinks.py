# SPDX-License-Identifier: Apache-2.0
"""Sinks that follow the recent tokens, as StreamingLLM's positions inside the cache do.

Recent tokens keep their places; moving the few sinks up to them gives the same distances as
renumbering everything. (Xiao et al., arXiv 2309.17453, section 3.2.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvfold.store.dense import DenseStore

# (keys [B, H, S, D], shift [B]) → keys rotated forward by so many positions
Rotate = Callable[[Tensor, Tensor], Tensor]


class MovingSinks:
    """The sinks' keys as given `[B, H, S, D]`; the store holds them rotated."""

    def __init__(self, store: DenseStore, count: int, rotate: Rotate) -> None:
        self.count, self.rotate = count, rotate
        self.given = store.keys.gather(2, self._slots(store)).clone()

    def restore(self, store: DenseStore) -> None:
        """Puts the keys back as they were given."""
        store.keys.scatter_(2, self._slots(store), self.given)

    def as_given(self, store: DenseStore) -> Tensor:
        """The stored keys `[B, H, T, D]` before any was moved, as a copy."""
        return store.keys.scatter(2, self._slots(store), self.given)

    def follow(self, store: DenseStore, evicted: Tensor) -> None:
        """Moves the sinks up to the oldest recent token, past `evicted [B]` tokens."""
        store.keys.scatter_(2, self._slots(store), self.rotate(self.given, evicted))

    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a selection along the batch axis."""
        self.given = rows(self.given)

    def _slots(self, store: DenseStore) -> Tensor:
        """Where the sinks are stored: the first slots after the holes on a row's left."""
        first = (store.positions >= 0).byte().argmax(-1, keepdim=True)
        slots = first + torch.arange(min(self.count, store.length), device=first.device)
        slots = slots.clamp(max=store.length - 1)
        return slots[..., None].expand(*slots.shape, store.keys.shape[-1])
