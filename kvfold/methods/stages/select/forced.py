# SPDX-License-Identifier: Apache-2.0
"""Forced entries: sinks, recent tokens, and spans that the user protects."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.methods.stages.allocate.rounding import ROUNDING


@dataclass(frozen=True)
class Share:
    """A number of tokens, as a share of the entries to keep."""

    of_kept: float


@dataclass(frozen=True)
class Forced:
    """The first `sinks` tokens, the last `recent` stored entries, and `spans` of positions.

    `recent` may be a `Share` of the entries to keep; it never takes more than sinks and spans
    leave.
    """

    sinks: int = 0
    recent: int | Share = 0
    spans: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        """True if any entry is forced."""
        return bool(self.sinks or self.recent or self.spans)

    @property
    def least(self) -> int:
        """Number of entries that any budget must hold; overlaps count once, a `Share` is 0."""
        count = end = 0
        for start, stop in sorted([(0, self.sinks), *self.spans]):
            count += max(0, stop - max(start, end))
            end = max(end, stop)
        return count + (0 if isinstance(self.recent, Share) else self.recent)

    def ends(self, kept: int) -> tuple[int, int] | None:
        """Number of first and of last entries that are forced among `kept + 1`.

        None if entries between are forced as well, or all. Rows must have no padding and must have
        kept as many before, so that all evicted entries lie between these ends.
        """
        recent = self.recent
        if isinstance(recent, Share):
            recent = min(_part(kept, recent), max(0, kept - self.sinks))
        return None if self.spans or self.sinks + recent > kept else (self.sinks, recent)

    def mask(self, positions: Tensor, counts: Tensor) -> Tensor:
        """Bool mask `[B, H, T]` of forced entries.

        `positions [B, H, T]`, −1 for padding; `counts [B]` are the entries to keep.
        """
        stored = positions >= 0
        forced = positions < self.sinks
        for start, stop in self.spans:
            forced |= (positions >= start) & (positions < stop)
        forced &= stored
        if self.recent == 0:
            return forced
        recent = torch.full_like(counts, 0 if isinstance(self.recent, Share) else self.recent)
        if isinstance(self.recent, Share):
            room = (counts - forced.sum(-1).amax(-1)).clamp(min=0)
            share = (counts.double() * self.recent.of_kept + ROUNDING).long()
            recent = torch.minimum(share, room)
        # Counted from the right over stored entries only, so that padding uses up no recent ones.
        age = stored.flip(-1).cumsum(-1).flip(-1)
        return forced | (stored & (age <= recent.view(-1, 1, 1)))

    def least_of(self, positions: Tensor) -> Tensor:
        """Number of entries `[B]` per head that are forced at any size."""
        none = torch.zeros(len(positions), dtype=torch.long, device=positions.device)
        return self.mask(positions, none).sum(-1).amax(-1)


def _part(kept: int, share: Share) -> int:
    return int(kept * share.of_kept + ROUNDING)
