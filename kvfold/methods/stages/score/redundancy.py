# SPDX-License-Identifier: Apache-2.0
"""Score by near-copies of a key among the others (R-KV)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 32  # rows of the cosines of all pairs of keys that exist at once, for a CPU's caches


def redundancy(
    keys: Tensor, positions: Tensor, threshold: float, retain: bool, spare_first: bool
) -> Tensor:
    """Mean cosine `[B, H, T]` of each key to the others, float32; of padding, any number.

    `keys [B, H, T, D]`, `positions [B, H, T]`, −1 for padding. With `retain` the latest of the keys
    whose cosine to a key exceeds `threshold` is not held against that key; where there is none,
    `spare_first` takes the first stored key, as the released code does. Only `TILE` rows of the
    cosines exist at once. Source: Zefan-Cai/R-KV `utils.py`, with each row of a batch by itself.
    """
    real = positions >= 0
    units = (keys.float() / (keys.float().norm(dim=-1, keepdim=True) + 1e-8)) * real[..., None]
    sums: Tensor = (units * (units.sum(2, keepdim=True) - units)).sum(-1)
    if retain:
        first = real.byte().argmax(-1, keepdim=True) if spare_first else None
        sums -= _of_latest_copies(units, threshold, first)
    return sums / real.sum(-1, keepdim=True).clamp(min=1)


def _of_latest_copies(units: Tensor, threshold: float, otherwise: Tensor | None) -> Tensor:
    """Sums `[B, H, T]` of the cosines of keys to their latest near-copy, by that copy.

    `units [B, H, T, D]` are of length 1, or 0 for padding; `otherwise [B, H, 1]` is the slot taken
    where a key has no near-copy.
    """
    length = units.shape[2]
    sums = units.new_zeros(units.shape[:3])
    after = torch.arange(1, length + 1, dtype=torch.int32, device=units.device)
    for start in range(0, length, TILE):
        cosines = units[:, :, start : start + TILE] @ units.transpose(-1, -2)
        cosines.diagonal(start, -2, -1).zero_()
        latest = ((cosines > threshold) * after).amax(-1).long() - 1  # [B, H, rows], −1: none
        found = latest >= 0
        slots = latest.clamp(min=0)
        if otherwise is not None:
            slots = torch.where(found, slots, otherwise)
        spared = cosines.gather(-1, slots[..., None])[..., 0]
        sums.scatter_add_(2, slots, spared if otherwise is not None else spared * found)
    return sums


def shares(redundancies: Tensor, positions: Tensor) -> Tensor:
    """Softmax `[B, H, T]` over the entries of each head; 0 for padding."""
    padding = positions < 0
    return F.softmax(redundancies.masked_fill(padding, -torch.inf), -1).masked_fill(padding, 0)
