# SPDX-License-Identifier: Apache-2.0
"""Gathers by slot: entries of a layer, or numbers that belong to entries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.kernels.dispatch import gather_path


def joined(rows: Sequence[Tensor]) -> Tensor:
    """Concatenation of all `rows [B, …]` along the batch axis; a single one is not copied."""
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def parted(rows: Tensor, count: int) -> Sequence[Tensor]:
    """Views of the `count` tensors of one shape that `joined` has put together."""
    return (rows,) if count == 1 else rows.chunk(count)


def pick(numbers: Tensor, slots: Tensor, empty: float) -> Tensor:
    """The `numbers [B, …, T]` at `slots [B, …, K]`, shape `[B, …, K]`; `empty` for a hole (−1)."""
    return numbers.gather(-1, slots.clamp(min=0)).masked_fill(slots < 0, empty)


def take(entries: Tensor, slots: Tensor) -> Tensor:
    """Copy `[B, H, K, D]` of `entries [B, H, T, D]` at `slots [B, H, K]`.

    A hole (−1) holds the head's first entry. Rows are copied whole: `gather` with an index for
    every number takes ten times as long.
    """
    size = entries.shape[-1]
    if not entries.numel():
        return entries.new_zeros(*slots.shape, size)
    rows, index = _rows(entries, slots)
    return rows.index_select(0, index.flatten()).view(*slots.shape, size)


def take_flat(keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Flat copies `[n, D]` and `[n, Dv]` of the entries at `slots [B, H, K]`, head after head.

    keys `[B, H, T, D]`, values `[B, H, T, Dv]`. Holes (−1), on the left, are skipped.
    """
    if gather_path(keys) == "triton":
        from kvfold.kernels.triton.gather import gather_rows

        return gather_rows(keys, values, slots)[:2]
    real = slots >= 0
    return _flat(keys, slots, real), _flat(values, slots, real)


def _flat(entries: Tensor, slots: Tensor, real: Tensor) -> Tensor:
    if not entries.numel():
        return entries.new_zeros(0, entries.shape[-1])
    rows, index = _rows(entries, slots)
    return rows.index_select(0, index[real])


def _rows(entries: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Memory as rows `[·, D]`, and the row index `[B, H, K]` of the entries at `slots`."""
    batch, heads, _, size = entries.shape
    entries = _of_whole_rows(entries)
    per_row, per_head, per_entry = (stride // size for stride in entries.stride()[:3])
    ends = zip(entries.shape[:3], (per_row, per_head, per_entry), strict=True)
    last = sum((length - 1) * step for length, step in ends)
    rows = entries.as_strided((last + 1, size), (size, 1))
    row = torch.arange(batch, device=slots.device).view(-1, 1, 1) * per_row
    head = torch.arange(heads, device=slots.device).view(-1, 1) * per_head
    return rows, slots.clamp(min=0) * per_entry + (row + head)


def _of_whole_rows(entries: Tensor) -> Tensor:
    """`entries [B, H, T, D]`; copied unless every stride is a multiple of D."""
    size = entries.shape[3]
    if entries.stride(3) == 1 and all(stride % size == 0 for stride in entries.stride()[:3]):
        return entries
    return entries.contiguous()


def as_added(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask of `dtype`: −∞ where `hidden` is true, 0 elsewhere."""
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)


def alive(positions: Tensor) -> Tensor:
    """Slots `[B, H, K]` of the entries whose position is not −1, ascending; −1 on the left."""
    slots = torch.arange(positions.shape[-1], device=positions.device).expand_as(positions)
    slots = slots.masked_fill(positions < 0, -1).sort(-1).values
    return slots[..., int((slots < 0).sum(-1).min()) :]
