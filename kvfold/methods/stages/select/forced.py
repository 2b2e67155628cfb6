# SPDX-License-Identifier: Apache-2.0
"""What must stay: sinks, recent tokens, spans that the user protects."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.methods.stages.allocate.rounding import ROUNDING


@dataclass(frozen=True)
class Share:
    """A number of tokens given as a part of the entries that are kept."""

    of_kept: float


@dataclass(frozen=True)
class Forced:
    """The first `sinks` tokens, the last `recent` stored ones, and `spans` of token indices.

    Indices count a row's tokens without its padding. `recent` may be a `Share` of what is kept:
    such a window never asks for more than the budget leaves it.
    """

    sinks: int = 0
    recent: int | Share = 0
    spans: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is forced."""
        return bool(self.sinks or self.recent or self.spans)

    @property
    def least(self) -> int:
        """The entries that any budget must hold, overlaps counted once."""
        count = end = 0
        for start, stop in sorted([(0, self.sinks), *self.spans]):
            count += max(0, stop - max(start, end))
            end = max(end, stop)
        return count + (0 if isinstance(self.recent, Share) else self.recent)

    def ends(self, kept: int) -> tuple[int, int] | None:
        """How many of the first and of the last of `kept + 1` entries are forced to stay.

        None where others are as well, or all. Rows must have no padding and have kept as many
        before, so that what is missing among their entries lies between these ends.
        """
        recent = self.recent
        if isinstance(recent, Share):
            recent = min(_part(kept, recent), max(0, kept - self.sinks))
        return None if self.spans or self.sinks + recent > kept else (self.sinks, recent)

    def mask(self, places: Tensor, counts: Tensor) -> Tensor:
        """Which stored entries are forced, bool `[B, H, T]`.

        `places [B, H, T]` number each row's tokens, −1 for padding; `counts [B]` are to be kept.
        """
        stored = places >= 0
        forced = places < self.sinks
        for start, stop in self.spans:
            forced |= (places >= start) & (places < stop)
        forced &= stored
        if self.recent == 0:
            return forced
        recent = torch.full_like(counts, 0 if isinstance(self.recent, Share) else self.recent)
        if isinstance(self.recent, Share):
            room = (counts - forced.sum(-1).amax(-1)).clamp(min=0)
            share = (counts.double() * self.recent.of_kept + ROUNDING).long()
            recent = torch.minimum(share, room)
        # Counted from the right end, so that padding never uses up recent tokens.
        age = stored.flip(-1).cumsum(-1).flip(-1)
        return forced | (stored & (age <= recent.view(-1, 1, 1)))

    def least_of(self, places: Tensor) -> Tensor:
        """Entries of each head that are forced whatever is kept, `[B]`; `places` as for `mask`."""
        none = torch.zeros(len(places), dtype=torch.long, device=places.device)
        return self.mask(places, none).sum(-1).amax(-1)


def _part(kept: int, share: Share) -> int:
    return int(kept * share.of_kept + ROUNDING)


def with_forced(scores: Tensor, forced: Tensor, places: Tensor) -> Tensor:
    """Scores with forced entries above all others and padding below all others."""
    return torch.where(forced, torch.inf, scores).masked_fill(places < 0, -torch.inf)
