# SPDX-License-Identifier: Apache-2.0
"""Quantization and packing in one pass; codes and layout as in `kernels/packing.py`."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.triton.device import on_its_device

# Groups that one program packs
LINES = 32


def pack_keys(rows: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Words `[n·bits/32, D]`, scale and minimum `[n/group, D]` of keys `[n, D]`.

    A group is `group` consecutive entries of one channel: a power of two, n a multiple of it.
    """
    entries, size = rows.shape
    assert entries % group == 0
    words = rows.new_empty(entries * bits // 32, size, dtype=torch.int32)
    return _packed(rows, words, (entries // group, size), bits, group, size)


def pack_values(rows: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Words `[n, Dv·bits/32]`, scale and minimum `[n, Dv/group]` of values `[n, Dv]`.

    A group is `group` consecutive channels of one entry: a power of two, Dv a multiple of it.
    """
    entries, size = rows.shape
    assert size % group == 0
    words = rows.new_empty(entries, size * bits // 32, dtype=torch.int32)
    return _packed(rows, words, (entries, size // group), bits, group, 1)


@on_its_device
def _packed(
    rows: Tensor, words: Tensor, groups: tuple[int, int], bits: int, group: int, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Words, scale and minimum of `groups`; fills `words`. A group's numbers lie `step` apart."""
    scale, minimum = rows.new_empty(groups), rows.new_empty(groups)
    lines = scale.numel()
    if lines:
        _pack[(triton.cdiv(lines, LINES),)](
            rows.contiguous(),
            words,
            scale,
            minimum,
            lines,
            STEP=step,
            BITS=bits,
            GROUP=group,
            LINES=LINES,
        )
    return words, scale, minimum


@triton.jit
def _pack(
    rows,
    words,
    scales,
    minima,
    lines,
    STEP: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
):
    PER_WORD: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = GROUP // PER_WORD
    LEVELS: tl.constexpr = (1 << BITS) - 1
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    real = (line < lines)[:, None]
    block, lane = line // STEP, line % STEP
    at = (block * (GROUP * STEP) + lane)[:, None] + (tl.arange(0, GROUP) * STEP)[None, :]
    numbers = tl.load(rows + at, real, 0.0).to(tl.float32)
    low, high = tl.min(numbers, 1), tl.max(numbers, 1)
    # IEEE division: the GPU's default is off by a bit, and codes would differ from plain torch.
    levels = tl.full([LINES], LEVELS, tl.float32)
    scale = tl.div_rn(high - low, levels).to(scales.dtype.element_ty)
    wide = scale.to(tl.float32)
    divisor = tl.where(wide == 0, 1.0, wide)[:, None] + tl.zeros([LINES, GROUP], tl.float32)
    steps = tl.div_rn(numbers - low[:, None], divisor)
    # Adding 1.5 · 2²³ leaves no bits for fractions, and so rounds half to even.
    steps = (steps + 12582912.0) - 12582912.0
    codes = tl.minimum(tl.maximum(steps, 0.0), LEVELS).to(tl.int32)
    codes = tl.reshape(codes, [LINES, WORDS, PER_WORD])
    packed = tl.sum(codes << (tl.arange(0, PER_WORD) * BITS)[None, None, :], 2)
    at = (block * (WORDS * STEP) + lane)[:, None] + (tl.arange(0, WORDS) * STEP)[None, :]
    tl.store(words + at, packed, real)
    tl.store(scales + line, scale, line < lines)
    tl.store(minima + line, low.to(minima.dtype.element_ty), line < lines)
