# SPDX-License-Identifier: Apache-2.0
"""Score by near-copies of a key among the others (R-KV)."""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 64  # columns of the cosines of all pairs of keys that exist at once, for a CPU's caches


def redundancy(
    keys: Tensor, positions: Tensor, threshold: float, retain: bool, spare_first: bool
) -> Tensor:
    """Mean cosine `[B, H, T]` of each key to the others, float32; of padding, any number.

    `keys [B, H, T, D]`, `positions [B, H, T]`, −1 for padding. With `retain` the latest of the keys
    whose cosine to a key exceeds `threshold` is not held against that key; where there is none,
    `spare_first` takes the first stored key, as the released code does. Only `TILE` columns of a
    head's cosines exist at once. Source: Zefan-Cai/R-KV `utils.py`, with each row of a batch by
    itself.
    """
    real = positions >= 0
    units = (keys.float() / (keys.float().norm(dim=-1, keepdim=True) + 1e-8)) * real[..., None]
    sums: Tensor = (units * (units.sum(2, keepdim=True) - units)).sum(-1)
    if retain:
        first = real.byte().argmax(-1) if spare_first else torch.full(real.shape[:2], -1)
        for head in product(*map(range, real.shape[:2])):
            sums[head] -= _of_latest_copies(units[head], threshold, int(first[head]))
    return sums / real.sum(-1, keepdim=True).clamp(min=1)


def _of_latest_copies(units: Tensor, threshold: float, otherwise: int) -> Tensor:
    """Sums `[T]` of the cosines of a head's keys to their latest near-copy, by that copy.

    `units [T, D]` are of length 1, or 0 for padding; `otherwise` is the slot taken where a key has
    no near-copy, −1 if none is.
    """
    slots = _latest_copies(units, threshold)
    slots = torch.where(slots < 0, otherwise, slots)
    spared = (slots >= 0) & (slots != torch.arange(len(units), device=units.device))
    keys, slots = units[spared], slots[spared]
    return units.new_zeros(len(units)).index_add_(0, slots, (keys * units[slots]).sum(-1))


def _latest_copies(units: Tensor, threshold: float) -> Tensor:
    """Slots `[T]` of the latest other key whose cosine to each exceeds `threshold`; −1: none.

    From the last columns on, and without the keys whose copy is found.
    """
    latest = torch.full((len(units),), -1, device=units.device)
    open_slots, rows = torch.arange(len(units), device=units.device), units
    for end in range(len(units), 0, -TILE):
        start = max(0, end - TILE)
        cosines = rows @ units[start:end].T
        itself = (open_slots >= start) & (open_slots < end)
        cosines[itself, open_slots[itself] - start] = 0
        copied = cosines.amax(-1) > threshold
        back = (cosines[copied] > threshold).flip(-1).byte().argmax(-1)
        latest[open_slots[copied]] = end - 1 - back
        open_slots, rows = open_slots[~copied], rows[~copied]
        if not len(rows):
            break
    return latest


def shares(redundancies: Tensor, positions: Tensor) -> Tensor:
    """Softmax `[B, H, T]` over the entries of each head; 0 for padding."""
    padding = positions < 0
    return F.softmax(redundancies.masked_fill(padding, -torch.inf), -1).masked_fill(padding, 0)
