# SPDX-License-Identifier: Apache-2.0
"""Re-indexed sinks: their keys are rotated forward, up to the recent tokens (StreamingLLM).

StreamingLLM renumbers all tokens inside the cache. Rotating the few sinks instead, while recent
tokens keep their positions, gives the same distances. Xiao et al., arXiv 2309.17453, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvfold.kernels.mean_rotation import Rotate
from kvfold.store.dense import DenseStore
from kvfold.store.sequence import LogicalSequence


class ReindexedSinks:
    """Keys of n sinks as the model gave them, `given [B, H, n, D]`; the store holds them rotated.

    Made at the first eviction, while no key of the store is rotated, whose entries are of a
    `sequence`. `first [B, H, 1]` is the slot of each row's first token; None: slot 0, as no row is
    padded.
    """

    def __init__(
        self, store: DenseStore, sequence: LogicalSequence, count: int, rotate: Rotate
    ) -> None:
        self.count, self.rotate = min(count, store.length), rotate
        self.given = self._stored(store, _first_slots(store, sequence)).clone()

    def restore(self, store: DenseStore, sequence: LogicalSequence) -> None:
        """Writes the given keys back into the store."""
        self._put(store, _first_slots(store, sequence), self.given)

    def as_given(self, store: DenseStore, sequence: LogicalSequence) -> Tensor:
        """Copy `[B, H, T, D]` of the stored keys, with the sinks as given."""
        index = self._index(store, _first_slots(store, sequence))
        return store.keys.scatter(2, index, self.given)

    def follow(self, store: DenseStore, sequence: LogicalSequence) -> None:
        """Rotates the sinks forward by the evicted tokens, up to the oldest recent one."""
        first, evicted = _first_slots(store, sequence), _evicted(store, sequence)
        if first is not None:
            # A row that has evicted nothing may have received its sinks since: none is rotated yet.
            whole = (evicted == 0).view(-1, 1, 1, 1)
            self.given = self._stored(store, first).where(whole, self.given)
        self._put(store, first, self.rotate(self.given, evicted))

    def moves(self, store: DenseStore, sequence: LogicalSequence) -> Tensor:
        """Positions by which `follow` has moved each stored key `[B, H, T]`: 0 but for sinks."""
        evicted = _evicted(store, sequence)
        slots = self._index(store, _first_slots(store, sequence))[..., 0]
        still = torch.zeros(store.keys.shape[:3], dtype=evicted.dtype, device=evicted.device)
        return still.scatter(2, slots, evicted.view(-1, 1, 1).expand_as(slots))

    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a copying selection along the batch axis."""
        self.given = rows(self.given)

    def _stored(self, store: DenseStore, first: Tensor | None) -> Tensor:
        """Stored keys of the sinks `[B, H, n, D]`; a view if no row is padded."""
        if first is None:
            return store.keys[:, :, : self.count]
        return store.keys.gather(2, self._index(store, first))

    def _put(self, store: DenseStore, first: Tensor | None, keys: Tensor) -> None:
        if first is None:
            store.keys[:, :, : self.count] = keys
        else:
            store.keys.scatter_(2, self._index(store, first), keys)

    def _index(self, store: DenseStore, first: Tensor | None) -> Tensor:
        """Slots of the sinks, expanded to `[B, H, n, D]`; a shorter row repeats its last slot."""
        slots = torch.arange(self.count, device=store.keys.device)
        slots = slots.expand(*store.keys.shape[:2], -1) if first is None else slots + first
        slots = slots.clamp(max=store.length - 1)
        return slots[..., None].expand(*slots.shape, store.keys.shape[-1])


def _first_slots(store: DenseStore, sequence: LogicalSequence) -> Tensor | None:
    """The slot of each row's first token `[B, H, 1]`; None without padding, where it is 0."""
    if sequence.valid is None:
        return None
    real = sequence.real(store.columns) >= 0
    if not real.shape[-1]:
        return real.new_zeros(*real.shape[:2], 1, dtype=torch.long)
    return real.byte().argmax(-1, keepdim=True)


def _evicted(store: DenseStore, sequence: LogicalSequence) -> Tensor:
    """Number of evicted tokens `[B]` of each row, the same in all heads."""
    seen = sequence.per_row(len(store.keys), store.keys.device)
    if sequence.valid is None:
        return seen - (store.length - store.dead)
    return seen - (sequence.real(store.columns)[:, 0] >= 0).sum(-1)
