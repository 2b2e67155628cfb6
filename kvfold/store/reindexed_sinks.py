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


class ReindexedSinks:
    """The sinks' keys as given `[B, H, S, D]`; the store holds them rotated.

    Made when the first entries leave, of a store of which no key is rotated. `first [B, H, 1]` is
    the slot of each row's first token; None: 0 everywhere, and no row is padded.
    """

    def __init__(self, store: DenseStore, first: Tensor | None, count: int, rotate: Rotate) -> None:
        self.count, self.rotate = min(count, store.length), rotate
        self.given = self._stored(store, first).clone()

    def restore(self, store: DenseStore, first: Tensor | None) -> None:
        """Puts the keys back as they were given."""
        self._put(store, first, self.given)

    def as_given(self, store: DenseStore, first: Tensor | None) -> Tensor:
        """The stored keys `[B, H, T, D]` before any was moved, as a copy."""
        return store.keys.scatter(2, self._index(store, first), self.given)

    def follow(self, store: DenseStore, first: Tensor | None, evicted: Tensor) -> None:
        """Moves the sinks up to the oldest recent token, past `evicted [B]` tokens."""
        if first is not None:
            # A short row's first tokens may have come since: nothing of it is moved yet.
            whole = (evicted == 0).view(-1, 1, 1, 1)
            self.given = self._stored(store, first).where(whole, self.given)
        self._put(store, first, self.rotate(self.given, evicted))

    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a selection along the batch axis."""
        self.given = rows(self.given)

    def _stored(self, store: DenseStore, first: Tensor | None) -> Tensor:
        """The sinks' keys in the store; a view where no row is padded."""
        if first is None:
            return store.keys[:, :, : self.count]
        return store.keys.gather(2, self._index(store, first))

    def _put(self, store: DenseStore, first: Tensor | None, keys: Tensor) -> None:
        if first is None:
            store.keys[:, :, : self.count] = keys
        else:
            store.keys.scatter_(2, self._index(store, first), keys)

    def _index(self, store: DenseStore, first: Tensor | None) -> Tensor:
        """Where the sinks are stored `[B, H, S, D]`; a row of fewer tokens repeats its last."""
        slots = torch.arange(self.count, device=store.keys.device)
        slots = slots.expand(*store.keys.shape[:2], -1) if first is None else slots + first
        slots = slots.clamp(max=store.length - 1)
        return slots[..., None].expand(*slots.shape, store.keys.shape[-1])
