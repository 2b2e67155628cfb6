# SPDX-License-Identifier: Apache-2.0
"""Online softmax in base 2, one block of logits at a time."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def dot_dtype(like: torch.Tensor) -> tl.dtype:
    """Operand dtype of `tl.dot`: the tensor's own; float32 in the interpreter (no bfloat16)."""
    half = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return half.get(like.dtype, tl.float32) if like.is_cuda else tl.float32


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

    State: highest logit `[G]`, sum of weights `[G]`, weighted values `[G, Dv]`. No row of logits
    may be all −inf.
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
    """Writes a part's output `[G, Dv]` and log-sum-exp `[G]` at `row`; 0 and −inf if empty."""
    head, column = tl.arange(0, G), tl.arange(0, SIZE)
    at = row * groups + head
    seen = total > 0
    whole = tl.where(seen, total, 1.0)
    inside = (head < groups)[:, None] & (column < size)[None, :]
    tl.store(parts + at[:, None] * size + column[None, :], mixed / whole[:, None], inside)
    lse = tl.where(seen, (most + tl.log2(whole)) * LN_2, float("-inf"))
    tl.store(sums + at, lse, head < groups)
