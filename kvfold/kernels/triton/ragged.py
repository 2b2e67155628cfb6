# SPDX-License-Identifier: Apache-2.0
"""Decode attention over raw segments: every entry is read once, by one of many programs.

Reference: plain attention over each segment alone.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.triton.device import on_its_device
from kvfold.kernels.triton.splits import (
    Splits,
    add_block,
    dot_dtype,
    launch_options,
    logits_of,
    store_part,
)

# Smallest number of rows in a tensor core's product
ROWS = 16


@on_its_device
def attend_to_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    scale: float,
    softcap: float | None = None,
    *,
    ends: Tensor | None = None,
    splits: Splits | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention output `[R, G, Dv]` and log-sum-exp `[R, G]`, float32, of R segments.

    query `[R, G, D]`, keys `[n, D]`, values `[n, Dv]`. Segment i is the rows from `starts[i]` to
    `ends[i] − 1`, by default `starts[i + 1] − 1`. An empty segment gives 0 and −inf. The output has
    the query's dtype. Without `splits` every call fetches the lengths from the device.
    """
    segments, groups, size = query.shape
    ends = starts[1:] if ends is None else ends
    if splits is None:
        splits = Splits.of((ends - starts[:segments]).tolist(), device=query.device)
    query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
    parts, sums = splits.room(groups, values.shape[1])
    if len(splits.segment):
        _attend[(len(splits.segment),)](
            query,
            keys,
            values,
            starts,
            ends,
            splits.segment,
            splits.part,
            parts,
            sums,
            splits.size,
            scale,
            softcap or 0.0,
            groups,
            size,
            values.shape[1],
            CAPPED=softcap is not None,
            G=max(ROWS, triton.next_power_of_2(groups)),
            D=max(ROWS, triton.next_power_of_2(size)),
            DV=max(ROWS, triton.next_power_of_2(values.shape[1])),
            DOT=dot_dtype(query),
            **launch_options(max(size, values.shape[1]) * query.element_size()),
        )
    return splits.merged(parts, sums, query.dtype)


@triton.jit
def _attend(
    query,
    keys,
    values,
    starts,
    ends,
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
    N: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DOT: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    segment = tl.load(segments + item).to(tl.int64)
    begin = tl.load(starts + segment).to(tl.int64) + tl.load(part_of + item) * part_size
    end = tl.minimum(begin + part_size, tl.load(ends + segment).to(tl.int64))
    head, column, value_column = tl.arange(0, G), tl.arange(0, D), tl.arange(0, DV)
    asked = (head < groups)[:, None] & (column < size)[None, :]
    at = (segment * groups + head)[:, None] * size + column[None, :]
    q = tl.load(query + at, asked, 0.0).to(DOT)
    most = tl.full([G], float("-inf"), tl.float32)
    total = tl.zeros([G], tl.float32)
    mixed = tl.zeros([G, DV], tl.float32)
    for first in range(begin, end, N):
        row = first + tl.arange(0, N)
        real = row < end
        inside = real[:, None] & (column < size)[None, :]
        k = tl.load(keys + row[:, None] * size + column[None, :], inside, 0.0)
        inside = real[:, None] & (value_column < value_size)[None, :]
        v = tl.load(values + row[:, None] * value_size + value_column[None, :], inside, 0.0)
        products = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee")
        logits = logits_of(products, scale, softcap, CAPPED)
        logits = tl.where(real[None, :], logits, float("-inf"))
        most, total, mixed = add_block(logits, v, most, total, mixed, DOT)
    store_part(mixed, most, total, parts, sums, item, groups, value_size, G, DV)
