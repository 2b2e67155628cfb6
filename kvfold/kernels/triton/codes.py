# SPDX-License-Identifier: Apache-2.0
"""Codes decoded in registers: those of `kernels/packing.py` and of `kernels/per_token.py`."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def packed_keys(
    words, scale, minimum, entry, seen, size,
    BITS: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Keys `[N, D]` from `entry` on, the first of a word: a word is of entries of one channel."""
    PER_WORD: tl.constexpr = 32 // BITS
    channel = tl.arange(0, D)[None, None, :]
    entry = (entry + tl.arange(0, N // PER_WORD) * PER_WORD)[:, None, None]
    seen = (tl.arange(0, N // PER_WORD) * PER_WORD < seen)[:, None, None]
    inside = seen & (channel < size)
    found = tl.load(words + entry // PER_WORD * size + channel, inside, 0)
    of_group = entry // GROUP * size + channel
    shifts = (tl.arange(0, PER_WORD) * BITS)[None, :, None]
    return tl.reshape(
        _numbers(found, scale + of_group, minimum + of_group, inside, shifts, BITS), [N, D]
    )


@triton.jit
def packed_values(
    words, scale, minimum, entry, seen, size,
    BITS: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Values `[N, D]` at `entry [N]` where `seen`: a word is of channels of one entry."""
    PER_WORD: tl.constexpr = 32 // BITS
    word = tl.arange(0, D // PER_WORD)[None, :, None]
    inside = seen[:, None, None] & (word < size // PER_WORD)
    entry = entry[:, None, None]
    found = tl.load(words + entry * (size // PER_WORD) + word, inside, 0)
    of_group = entry * (size // GROUP) + word * PER_WORD // GROUP
    shifts = (tl.arange(0, PER_WORD) * BITS)[None, None, :]
    return tl.reshape(
        _numbers(found, scale + of_group, minimum + of_group, inside, shifts, BITS), [N, D]
    )


@triton.jit
def _numbers(words, step, low, inside, shifts, BITS: tl.constexpr):
    """Dequantized numbers of `words`: its codes spread along the axis of `shifts`."""
    codes = (words >> shifts) & ((1 << BITS) - 1)
    lowest = tl.load(low, inside, 0.0)
    numbers = codes.to(tl.float32) * tl.load(step, inside, 0.0).to(tl.float32)
    return (numbers + lowest.to(tl.float32)).to(lowest.dtype)


@triton.jit
def rotated_keys(rows, table, entry, seen, size, BITS: tl.constexpr, D: tl.constexpr):
    """Rotated keys `[N, D]` of length 1 at `entry [N]`; of FP8, keys that lack their scale."""
    channel = tl.arange(0, D)[None, :]
    inside = seen[:, None] & (channel < size)
    codes = _codes(rows, entry[:, None], channel, inside, size, BITS)
    return _float8(codes) if BITS == 8 else tl.load(table + codes, inside, 0.0)


@triton.jit
def token_values(rows, scales, entry, seen, size, BITS: tl.constexpr, D: tl.constexpr):
    """Values `[N, D]` at `entry [N]` where `seen`; scale and minimum of an entry are neighbours."""
    channel = tl.arange(0, D)[None, :]
    inside = seen[:, None] & (channel < size)
    codes = _codes(rows, entry[:, None], channel, inside, size, BITS)
    step = tl.load(scales + 2 * entry, seen, 0.0).to(tl.float32)
    low = tl.load(scales + 2 * entry + 1, seen, 0.0).to(tl.float32)
    return codes.to(tl.float32) * step[:, None] + low[:, None]


@triton.jit
def _codes(rows, entry, channel, inside, size, BITS: tl.constexpr):
    """Codes of channels of entries, in the layout of `codebook.packed`."""
    width = size * BITS // 8
    if BITS == 8:
        codes = tl.load(rows + entry * width + channel, inside, 0).to(tl.int32)
    elif BITS == 3:
        low, high = size // 4, size // 8
        at = rows + entry * width
        two = tl.load(at + channel % low, inside, 0).to(tl.int32) >> (channel // low * 2)
        one = tl.load(at + low + channel % high, inside, 0).to(tl.int32) >> (channel // high)
        codes = (two & 3) | ((one & 1) << 2)
    else:
        packed = tl.load(rows + entry * width + channel % width, inside, 0).to(tl.int32)
        codes = (packed >> (channel // width * BITS)) & ((1 << BITS) - 1)
    return codes


@triton.jit
def _float8(codes):
    """Numbers of FP8 codes (e4m3): the exponent's bias of float32 is 120 larger."""
    numbers = ((codes & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(codes > 127, -numbers, numbers)
