# SPDX-License-Identifier: Apache-2.0
"""The highest scores win; of equal ones the earlier position."""

from __future__ import annotations

import torch
from torch import Tensor


def top(scores: Tensor, counts: Tensor) -> Tensor:
    """Slots of the `counts`, `[B]` or `[B, H]`, highest `scores [B, H, T]`, ascending.

    `[B, H, max(counts)]`: heads that keep fewer are filled up with −1 on the left.
    """
    most = int(counts.max())
    stored = scores.shape[-1]
    if most == stored - 1 and bool((counts == most).all()):
        return _all_but_lowest(scores)
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :most]
    each = counts.view(len(counts), -1, 1)
    surplus = torch.arange(most, device=scores.device) >= each
    return order.masked_fill(surplus, -1).sort(dim=-1).values


def _all_but_lowest(scores: Tensor) -> Tensor:
    """The step of every decode-time eviction, without a sort: of equal scores the latest goes."""
    last = scores.shape[-1] - 1
    slots = torch.arange(last, device=scores.device).expand(*scores.shape[:2], last)
    return slots + (slots >= lowest(scores))


def lowest(scores: Tensor, first: int = 0) -> Tensor:
    """Slot `[B, H, 1]` of each head's lowest score, of equal ones the latest.

    The scores `[B, H, T]` are those of slots from `first` on.
    """
    if torch.compiler.is_compiling():
        # Two passes that run on vectors, as one over what is flipped does not.
        slots = torch.arange(first, first + scores.shape[-1], device=scores.device)
        least = scores == scores.amin(-1, keepdim=True)
        return slots.where(least, -1).amax(-1, keepdim=True)
    last = first + scores.shape[-1] - 1
    return last - scores.flip(-1).argmin(-1, keepdim=True)
