# SPDX-License-Identifier: Apache-2.0
"""What must stay: sinks, recent tokens, spans that the user protects."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """A number of tokens given as a part of the entries that are kept."""

    of_kept: float


@dataclass(frozen=True)
class Forced:
    """The first `sinks` tokens, the last `recent` stored ones, and `spans` of token indices.

    Indices count a row's tokens without its padding. `recent` may be a `Share` of what is kept:
    such a window never asks for more than the budget.
    """

    sinks: int = 0
    recent: int | Share = 0
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def least(self) -> int:
        """The entries that any budget must hold, overlaps counted once."""
        inside = set(range(self.sinks))
        for start, stop in self.spans:
            inside |= set(range(start, stop))
        return len(inside) + (0 if isinstance(self.recent, Share) else self.recent)

    def mask(self, positions: Tensor, padding: Tensor, counts: Tensor) -> Tensor:
        """Which stored entries are forced, bool `[B, H, T]`.

        positions `[B, H, T]`; per row `[B]` the padding columns and the entries to keep.
        """
        if isinstance(self.recent, Share):
            recent = (counts * self.recent.of_kept).long().view(-1, 1, 1)
        else:
            recent = torch.full_like(counts, self.recent).view(-1, 1, 1)
        stored = positions >= 0
        token = positions - padding.view(-1, 1, 1)
        forced = token < self.sinks
        # Counted from the right end, so that a row's padding never uses up its recent tokens.
        age = stored.flip(-1).cumsum(-1).flip(-1)
        forced |= age <= recent
        for start, stop in self.spans:
            forced |= (token >= start) & (token < stop)
        return forced & stored


def with_forced(scores: Tensor, forced: Tensor, positions: Tensor) -> Tensor:
    """Scores with forced entries above all others and padding below all others."""
    return torch.where(forced, torch.inf, scores).masked_fill(positions < 0, -torch.inf)
