# SPDX-License-Identifier: Apache-2.0
"""Picking whole entries out of a layer's keys or values."""

from __future__ import annotations

import torch
from torch import Tensor


def take(entries: Tensor, slots: Tensor) -> Tensor:
    """`entries [B, H, T, D]` in `slots [B, H, K]`: a copy `[B, H, K, D]`.

    A hole (−1) holds whatever lies first. Rows are copied whole: `gather` with an index for every
    number takes ten times as long.
    """
    batch, heads, _, size = entries.shape
    if not entries.numel():
        return entries.new_zeros(*slots.shape, size)
    entries = _of_whole_rows(entries)
    per_row, per_head, per_entry = (stride // size for stride in entries.stride()[:3])
    ends = zip(entries.shape[:3], (per_row, per_head, per_entry), strict=True)
    last = sum((length - 1) * step for length, step in ends)
    rows = entries.as_strided((last + 1, size), (size, 1))
    row = torch.arange(batch, device=slots.device).view(-1, 1, 1) * per_row
    head = torch.arange(heads, device=slots.device).view(-1, 1) * per_head
    index = slots.clamp(min=0) * per_entry + (row + head)
    return rows.index_select(0, index.flatten()).view(*slots.shape, size)


def _of_whole_rows(entries: Tensor) -> Tensor:
    """The same, as a copy unless every stride is a multiple of a row."""
    size = entries.shape[3]
    if entries.stride(3) == 1 and all(stride % size == 0 for stride in entries.stride()[:3]):
        return entries
    return entries.contiguous()
