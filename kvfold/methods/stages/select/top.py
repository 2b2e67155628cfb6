# SPDX-License-Identifier: Apache-2.0
"""Selection by score: the highest are kept; of equal ones the earlier position."""

from __future__ import annotations

import torch
from torch import Tensor


def top(scores: Tensor, counts: Tensor) -> Tensor:
    """Slots `[B, H, max(counts)]` of the highest `scores [B, H, T]`, ascending.

    `counts`, `[B]` or `[B, H]`, are the entries to keep; heads that keep fewer than the most are
    padded with −1 on the left.
    """
    most = int(counts.max())
    stored = scores.shape[-1]
    if most == stored - 1 and bool((counts == most).all()):
        return _all_but_lowest(scores)
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :most]
    each = counts.view(len(counts), -1, 1)
    surplus = torch.arange(most, device=scores.device) >= each
    return order.masked_fill(surplus, -1).sort(dim=-1).values


def highest(scores: Tensor, counts: Tensor) -> Tensor:
    """Bool mask `[B, H, T]` of the `counts`, `[B]` or `[B, H]`, highest; of equal ones the earlier.

    `scores [B, H, T]`.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    each = counts.view(len(counts), -1, 1)
    first = torch.arange(scores.shape[-1], device=scores.device) < each
    return torch.zeros_like(scores, dtype=torch.bool).scatter(2, order, first.expand_as(scores))


def kept_mask(slots: Tensor, stored: int) -> Tensor:
    """Bool mask `[B, H, T]` of `slots [B, H, K]`, −1 for holes, among `stored` entries."""
    # Holes write into an extra slot, which is cut off.
    mask = torch.zeros(*slots.shape[:2], stored + 1, dtype=torch.bool, device=slots.device)
    return mask.scatter(2, slots.masked_fill(slots < 0, stored), True)[..., :stored]


def _all_but_lowest(scores: Tensor) -> Tensor:
    """Slots `[B, H, T − 1]` of all but the lowest score, the latest of equal ones; no sort."""
    last = scores.shape[-1] - 1
    slots = torch.arange(last, device=scores.device).expand(*scores.shape[:2], last)
    return slots + (slots >= lowest(scores)[0])


def lowest(scores: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Slot of each head's lowest score, of equal ones the latest, and that score: `[B, H, 1]` each.

    `scores [B, H, T]` belong to the slots from `first` on. NaN counts as lowest.
    """
    if torch.compiler.is_compiling():
        # Two vectorized passes: a single one over a flipped tensor is not vectorized.
        slots = torch.arange(first, first + scores.shape[-1], device=scores.device)
        least = scores.amin(-1, keepdim=True)
        return slots.where(scores == least, -1).amax(-1, keepdim=True), least
    least, at = scores.flip(-1).min(-1, keepdim=True)
    return first + scores.shape[-1] - 1 - at, least


def with_forced(scores: Tensor, forced: Tensor, positions: Tensor) -> Tensor:
    """Scores `[B, H, T]` with +∞ at forced entries and −∞ at padding."""
    return torch.where(forced, torch.inf, scores).masked_fill(positions < 0, -torch.inf)
