# SPDX-License-Identifier: Apache-2.0
"""Softmax in base 2 over logits that come a block at a time."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def dot_dtype(like: torch.Tensor) -> tl.dtype:
    """What products are made of: the tensor's own dtype, but the interpreter knows no bfloat16."""
    half = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return half.get(like.dtype, tl.float32) if like.is_cuda else tl.float32


@triton.jit
def logits_of(products, scale, softcap, CAPPED: tl.constexpr):
    """Logits in base 2: scaled, and bent below `softcap` where there is one."""
    logits = products * scale
    if CAPPED:
        # softcap · tanh(logits / softcap)
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    return logits * LOG2_E


@triton.jit
def add_block(logits, values, most, total, mixed, DOT: tl.constexpr):
    """One more block of logits `[G, N]` and values `[N, Dv]`; a row of logits is not all −inf.

    Running state: the highest logit and the sum of weights `[G]`, the weighted values `[G, Dv]`.
    """
    highest = tl.maximum(most, tl.max(logits, 1))
    fade = tl.exp2(most - highest)
    weights = tl.exp2(logits - highest[:, None])
    total = total * fade + tl.sum(weights, 1)
    product = tl.dot(weights.to(DOT), values.to(DOT), input_precision="ieee")
    return highest, total, mixed * fade[:, None] + product


@triton.jit
def store_part(
    mixed, most, total, parts, sums, row, groups, size, G: tl.constexpr, SIZE: tl.constexpr
):
    """Writes a part's mean `[G, Dv]` and log-sum-exp `[G]` at `row`; nothing seen: 0 and −inf."""
    head, column = tl.arange(0, G), tl.arange(0, SIZE)
    at = row * groups + head
    seen = total > 0
    whole = tl.where(seen, total, 1.0)
    inside = (head < groups)[:, None] & (column < size)[None, :]
    tl.store(parts + at[:, None] * size + column[None, :], mixed / whole[:, None], inside)
    lse = tl.where(seen, (most + tl.log2(whole)) * LN_2, float("-inf"))
    tl.store(sums + at, lse, head < groups)
