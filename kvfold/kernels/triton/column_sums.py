# SPDX-License-Identifier: Apache-2.0
"""Column sums of attention weights, in one pass after attention, from its log-sum-exps.

Reference: `kernels.reference.attend_with_moments`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.triton.device import on_its_device
from kvfold.kernels.triton.online_softmax import LOG2_E, dot_dtype, logits_of, wide

KEYS = QUERIES = 64


def column_sums(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    visible: Tensor | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """Column sums `[B, H, T]` over queries, mean over the query heads of a group, float32.

    query `[B, Hq, S, D]`, key `[B, H, T, D]`; `lse [B, Hq, S]` is the log-sum-exp of the logits
    that a query sees: causal, aligned to the last key, and `visible [B, T]` (None: all). Queries
    count where `counted [B, S]` is true (None: all); those that see nothing (lse −inf) do not.
    """
    return _columns(query, key, lse, scale, softcap, visible, counted, squared=False)[0]


def column_moments(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    visible: Tensor | None = None,
    counted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `column_sums`, and the column sums `[B, H, T]` of the squared group means."""
    return _columns(query, key, lse, scale, softcap, visible, counted, squared=True)


@on_its_device
def _columns(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
    visible: Tensor | None,
    counted: Tensor | None,
    squared: bool,
) -> tuple[Tensor, Tensor]:
    batch, heads, stored, size = key.shape
    query_heads, queries = query.shape[1:3]
    sums = query.new_empty(batch, heads, stored, dtype=torch.float32)
    squares = torch.empty_like(sums) if squared else sums
    query = query if query.stride(3) == 1 else query.contiguous()
    key = key if key.stride(3) == 1 else key.contiguous()
    _add_up[(triton.cdiv(stored, KEYS), batch * heads)](
        query,
        key,
        lse.contiguous(),
        visible if visible is None else visible.contiguous(),
        counted if counted is None else counted.contiguous(),
        sums,
        squares,
        *query.stride()[:3],
        *key.stride()[:3],
        scale,
        softcap or 0.0,
        heads,
        queries,
        stored,
        size,
        GROUPS=query_heads // heads,
        CAPPED=softcap is not None,
        SQUARED=squared,
        KEYS=KEYS,
        QUERIES=QUERIES,
        D=wide(size),
        DOT=dot_dtype(query),
        num_stages=2 if query.element_size() > 2 else 3,
    )
    return sums, squares


@triton.jit
def _add_up(
    query,
    key,
    lse,
    visible,
    counted,
    sums,
    squares,
    query_row_step,
    query_head_step,
    query_step,
    key_row_step,
    key_head_step,
    key_step,
    scale,
    softcap,
    heads,
    queries,
    stored,
    size,
    GROUPS: tl.constexpr,
    CAPPED: tl.constexpr,
    SQUARED: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    DOT: tl.constexpr,
):
    row_head = tl.program_id(1).to(tl.int64)
    row, head = row_head // heads, row_head % heads
    first_key = tl.program_id(0) * KEYS
    column, dim = first_key + tl.arange(0, KEYS), tl.arange(0, D)
    real = column < stored
    if visible is not None:
        real = real & (tl.load(visible + row * stored + column, real, 0) != 0)
    at = row * key_row_step + head * key_head_step + column.to(tl.int64) * key_step
    k = tl.load(key + at[:, None] + dim[None, :], real[:, None] & (dim < size)[None, :], 0.0)
    k = k.to(DOT)
    received = tl.zeros([KEYS], tl.float32)
    received_squares = tl.zeros([KEYS], tl.float32)
    # Earlier queries see none of these keys.
    start = tl.maximum(first_key - (stored - queries), 0) // QUERIES * QUERIES
    for first in range(start, queries, QUERIES):
        asking = first + tl.arange(0, QUERIES)
        voting = asking < queries
        if counted is not None:
            voting = voting & (tl.load(counted + row * queries + asking, voting, 0) != 0)
        seen = real[:, None] & (column[:, None] <= (asking + stored - queries)[None, :])
        of_group = tl.zeros([KEYS, QUERIES], tl.float32)
        for member in range(GROUPS):
            query_head = head * GROUPS + member
            of_head = query + row * query_row_step + query_head * query_head_step
            offsets = asking.to(tl.int64)[:, None] * query_step + dim[None, :]
            inside = (asking < queries)[:, None] & (dim < size)[None, :]
            q = tl.load(of_head + offsets, inside, 0.0).to(DOT)
            of_head = lse + (row * heads * GROUPS + query_head) * queries
            total = tl.load(of_head + asking, voting, float("-inf"))
            products = tl.dot(k, tl.trans(q), input_precision="tf32x3")
            logits = logits_of(products, scale, softcap, CAPPED)
            weights = tl.exp2(logits - (total * LOG2_E)[None, :])
            # Queries that see nothing have no weights.
            of_group += tl.where(seen & (total > float("-inf"))[None, :], weights, 0.0)
        received += tl.sum(of_group, 1)
        if SQUARED:
            received_squares += tl.sum(of_group * of_group, 1)
    at = row_head * stored + column
    tl.store(sums + at, received / GROUPS, column < stored)
    if SQUARED:
        tl.store(squares + at, received_squares / (GROUPS * GROUPS), column < stored)
