# SPDX-License-Identifier: Apache-2.0
"""Flat copies of kept entries, segment after segment, keys and values in one launch.

Reference: the plain-torch path of `kernels.gather.take_flat`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.triton.device import on_its_device
from kvfold.kernels.triton.online_softmax import wide

ENTRIES = 32


@on_its_device
def gather_rows(keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flat keys `[n, D]`, values `[n, Dv]` and segment starts `[B·H + 1]`, int64.

    keys `[B, H, T, D]`, values `[B, H, T, Dv]`, `slots [B, H, K]` with holes (−1) on the left,
    which are skipped. Waits for the device, to learn n.
    """
    batch, heads, width = slots.shape
    starts = slots.new_zeros(batch * heads + 1, dtype=torch.int64)
    torch.cumsum((slots >= 0).sum(-1).flatten(), 0, out=starts[1:])
    total = int(starts[-1])
    keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in (keys, values))
    flat_keys, flat_values = (x.new_empty(total, x.shape[3]) for x in (keys, values))
    if total:
        _gather[(batch * heads, triton.cdiv(width, ENTRIES))](
            keys,
            values,
            slots.contiguous(),
            starts,
            flat_keys,
            flat_values,
            *keys.stride()[:3],
            *values.stride()[:3],
            heads,
            width,
            keys.shape[3],
            values.shape[3],
            N=ENTRIES,
            D=wide(keys.shape[3]),
            DV=wide(values.shape[3]),
        )
    return flat_keys, flat_values, starts


@triton.jit
def _gather(
    keys,
    values,
    slots,
    starts,
    flat_keys,
    flat_values,
    key_row_step,
    key_head_step,
    key_step,
    value_row_step,
    value_head_step,
    value_step,
    heads,
    width,
    size,
    value_size,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
):
    segment = tl.program_id(0).to(tl.int64)
    row, head = segment // heads, segment % heads
    index = tl.program_id(1) * N + tl.arange(0, N)
    slot = tl.load(slots + segment * width + index, index < width, -1).to(tl.int64)
    # The last of a segment's slots is its last entry: holes are on the left.
    to = tl.load(starts + segment + 1) - width + index
    key_at = row * key_row_step + head * key_head_step + slot * key_step
    _copy_rows(keys, flat_keys, key_at, to, slot >= 0, size, D)
    value_at = row * value_row_step + head * value_head_step + slot * value_step
    _copy_rows(values, flat_values, value_at, to, slot >= 0, value_size, DV)


@triton.jit
def _copy_rows(source, target, at, to, real, size, D: tl.constexpr):
    column = tl.arange(0, D)
    inside = real[:, None] & (column < size)[None, :]
    rows = tl.load(source + at[:, None] + column[None, :], inside)
    tl.store(target + to[:, None] * size + column[None, :], rows, inside)
