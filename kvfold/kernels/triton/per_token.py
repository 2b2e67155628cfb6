# SPDX-License-Identifier: Apache-2.0
"""Decode attention over entries quantized one by one; keys are not rotated back.

Reference: plain attention over `RotatedKeys.decoded` and `TokenValues.decoded`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.codebook import centroids
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.kernels.triton.device import on_its_device
from kvfold.kernels.triton.ragged import ROWS
from kvfold.kernels.triton.splits import (
    Splits,
    add_block,
    dot_dtype,
    launch_options,
    logits_of,
    store_part,
)


@on_its_device
def attend_to_per_token(
    query: Tensor,
    keys: RotatedKeys,
    values: TokenValues,
    scale: float,
    softcap: float | None = None,
    *,
    splits: Splits | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention output `[R, G, Dv]` of `query [R, G, D]`, and log-sum-exp `[R, G]`, float32.

    Attends to the quantized entries of R segments; a segment without any gives 0 and −inf. The
    output has the query's dtype. `splits` of the numbers of quantized entries are kept with the
    keys if none are given.
    """
    _, groups, size = query.shape
    value_size = values.size
    if splits is None:
        splits = keys.codes.splits
    parts, sums = splits.room(groups, value_size)
    table_bits = 4 if keys.bits == 8 else keys.bits  # of FP8 keys none is looked up
    if len(splits.segment):
        _attend[(len(splits.segment),)](
            keys.asked(query).contiguous(),
            keys.codes.rows,
            keys.scales.rows,
            centroids(table_bits, torch.float32, query.device),
            values.codes.rows,
            values.scales.rows,
            keys.codes.starts,
            splits.segment,
            splits.part,
            parts,
            sums,
            splits.size,
            scale,
            softcap or 0.0,
            groups,
            size,
            value_size,
            CAPPED=softcap is not None,
            KEY_BITS=keys.bits,
            VALUE_BITS=values.bits,
            G=max(ROWS, triton.next_power_of_2(groups)),
            D=max(ROWS, triton.next_power_of_2(size)),
            DV=max(ROWS, triton.next_power_of_2(value_size)),
            DOT=dot_dtype(query),
            **launch_options(max(size, value_size) * query.element_size()),
        )
    return splits.merged(parts, sums, query.dtype)


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
        run = size * BITS // 8
        packed = tl.load(rows + entry * width + channel % run, inside, 0).to(tl.int32)
        codes = (packed >> (channel // run * BITS)) & ((1 << BITS) - 1)
    return codes


@triton.jit
def _float8(codes):
    """Numbers of FP8 codes (e4m3): the exponent's bias of float32 is 120 larger."""
    wide = ((codes & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(codes > 127, -wide, wide)


@triton.jit
def _attend(
    query,
    key_codes,
    key_scales,
    table,
    value_codes,
    value_scales,
    starts,
    segments,
    part_of,
    parts,
    sums,
    part_size,
    scale,
    softcap,
    groups,
    size,
    value_size,
    CAPPED: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DOT: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    segment = tl.load(segments + item).to(tl.int64)
    start = tl.load(starts + segment).to(tl.int64)
    length = tl.load(starts + segment + 1).to(tl.int32) - start.to(tl.int32)
    begin = tl.load(part_of + item) * part_size
    end = tl.minimum(begin + part_size, length)
    head = tl.arange(0, G)
    column, value_column = tl.arange(0, D)[None, :], tl.arange(0, DV)[None, :]
    asked = (head < groups)[:, None] & (column < size)
    q = tl.load(query + (segment * groups + head)[:, None] * size + column, asked, 0.0).to(DOT)
    most = tl.full([G], float("-inf"), tl.float32)
    total = tl.zeros([G], tl.float32)
    mixed = tl.zeros([G, DV], tl.float32)
    for first in range(begin, end, N):
        row = first + tl.arange(0, N)
        seen, entry = row < end, start + row

        inside = seen[:, None] & (column < size)
        codes = _codes(key_codes, entry[:, None], column, inside, size, KEY_BITS)
        k = _float8(codes) if KEY_BITS == 8 else tl.load(table + codes, inside, 0.0)
        lengths = tl.load(key_scales + entry, seen, 0.0).to(tl.float32)

        inside = seen[:, None] & (value_column < value_size)
        codes = _codes(value_codes, entry[:, None], value_column, inside, value_size, VALUE_BITS)
        step = tl.load(value_scales + 2 * entry, seen, 0.0).to(tl.float32)
        low = tl.load(value_scales + 2 * entry + 1, seen, 0.0).to(tl.float32)
        v = codes.to(tl.float32) * step[:, None] + low[:, None]

        products = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee") * lengths[None, :]
        logits = logits_of(products, scale, softcap, CAPPED)
        logits = tl.where(seen[None, :], logits, float("-inf"))
        most, total, mixed = add_block(logits, v, most, total, mixed, DOT)
    store_part(mixed, most, total, parts, sums, item, groups, value_size, G, DV)
