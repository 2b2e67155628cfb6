# SPDX-License-Identifier: Apache-2.0
"""Softmax of a decode kernel in base 2: one block of logits at a time, then over parts."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Smallest number of rows in a tensor core's product
ROWS = 16
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def dot_dtype(like: torch.Tensor) -> tl.dtype:
    """Operand dtype of `tl.dot`: the tensor's own; float32 in the interpreter (no bfloat16)."""
    half = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return half.get(like.dtype, tl.float32) if like.is_cuda else tl.float32


def wide(size: int) -> int:
    """Channels of a block that holds rows of `size` numbers."""
    return max(ROWS, triton.next_power_of_2(size))


@triton.jit
def logits_of(products, scale, softcap, CAPPED: tl.constexpr):
    """Logits in base 2: scaled, and capped at `softcap` if CAPPED."""
    logits = products * scale
    if CAPPED:
        # softcap · tanh(logits / softcap)
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    return logits * LOG2_E


@triton.jit
def add_block(logits, values, most, total, mixed, DOT: tl.constexpr):
    """Running softmax state after one more block of logits `[G, N]` and values `[N, Dv]`.

    State: highest logit `[G]`, sum of weights `[G]`, weighted values `[G, Dv]`.
    """
    highest = tl.maximum(most, tl.max(logits, 1))
    # Where nothing was seen there is no highest logit to subtract.
    level = tl.where(highest == float("-inf"), 0.0, highest)
    fade = tl.exp2(most - level)
    weights = tl.exp2(logits - level[:, None])
    total = total * fade + tl.sum(weights, 1)
    product = tl.dot(weights.to(DOT), values.to(DOT), input_precision="ieee")
    return highest, total, mixed * fade[:, None] + product


@triton.jit
def store_part(
    mixed, most, total, parts, sums, row, groups, size, G: tl.constexpr, SIZE: tl.constexpr
):
    """Writes a part's output `[G, Dv]` and log-sum-exp `[G]` at `row`; 0 and −inf if empty."""
    head, column = tl.arange(0, G), tl.arange(0, SIZE)
    at = row * groups + head
    seen = total > 0
    whole = tl.where(seen, total, 1.0)
    inside = (head < groups)[:, None] & (column < size)[None, :]
    tl.store(parts + at[:, None] * size + column[None, :], mixed / whole[:, None], inside)
    lse = tl.where(seen, (most + tl.log2(whole)) * LN_2, float("-inf"))
    tl.store(sums + at, lse, head < groups)


def merged(
    parts: Tensor, sums: Tensor, first: Tensor, sink_logits: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Outputs `[R, G, Dv]` and log-sum-exps `[R, G]` of segments, from those of their parts.

    Segment s has the `parts [·, G, Dv]` and `sums [·, G]` from `first[s]` to `first[s + 1] − 1`.
    Sink logits `[Hq]` take a share of the weight, and have no values.
    """
    segments, (_, groups, size) = len(first) - 1, parts.shape
    out = parts.new_empty(segments, groups, size, dtype=dtype)
    lse = parts.new_empty(segments, groups)
    heads = segments if sink_logits is None else len(sink_logits) // groups
    _merge[(segments, groups)](
        *(parts, sums, first, sink_logits, out, lse, heads, groups, size),
        PARTS=16,
        SIZE=triton.next_power_of_2(size),
    )
    return out, lse


@triton.jit
def _merge(
    parts,
    sums,
    first,
    sinks,
    out,
    lse,
    heads,
    groups,
    size,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    segment, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, SIZE)
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([SIZE], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + segment % heads * groups + head + tl.arange(0, 1)).to(tl.float32)
        most, total = sink * LOG2_E, tl.where(sink > float("-inf"), 1.0, 0.0)
    end = tl.load(first + segment + 1)
    for at in range(tl.load(first + segment), end, PARTS):
        item = (at + tl.arange(0, PARTS)).to(tl.int64)
        row = item * groups + head
        part_sum = tl.load(sums + row, item < end, float("-inf")) * LOG2_E
        inside = (item < end)[:, None] & (column < size)[None, :]
        part = tl.load(parts + row[:, None] * size + column[None, :], inside, 0.0)
        highest = tl.maximum(most, tl.max(part_sum, 0))
        # Empty parts have no highest logit to subtract.
        level = tl.where(highest == float("-inf"), 0.0, highest)
        fade, weights = tl.exp2(most - level), tl.exp2(part_sum - level)
        total = total * fade + tl.sum(weights, 0)
        mixed = mixed * fade + tl.sum(weights[:, None] * part, 0)
        most = highest
    whole = tl.where(total > 0, total, 1.0)
    at = segment * groups + head
    tl.store(out + at * size + column, mixed / whole, column < size)
    tl.store(lse + at + tl.arange(0, 1), (most + tl.log2(whole)) * LN_2)
