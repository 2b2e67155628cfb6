# SPDX-License-Identifier: Apache-2.0
"""One pass over blocks of queries: softmax rows give output and column sums together."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128


def attend_with_column_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    counted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.attend_with_column_sums`, with memory linear in T.

    One KV head at a time, so that a block of rows stays in the processor's cache between its
    softmax and the two products that use it.
    """
    # Buffers are reused, so nothing here can be differentiated.
    query, key, value = query.detach(), key.detach(), value.detach()
    batch, query_heads, queries, size = query.shape
    heads, stored = key.shape[1:3]
    groups = query_heads // heads
    out = query.new_empty(batch, heads, groups, queries, value.shape[-1])
    sums = torch.zeros(batch, heads, stored, dtype=_accumulator(query), device=query.device)
    grouped = (query * scale).view(batch, heads, groups, queries, size)
    room = sums.new_empty(groups * min(BLOCK, queries) * stored)
    for row in range(batch):
        for head in range(heads):
            share = slice(head * groups, (head + 1) * groups)
            for start in range(0, queries, BLOCK):
                end = min(start + BLOCK, queries)
                # A causal block sees the keys up to its own last query.
                seen = stored - queries + end if mask is None else stored
                rows = grouped[row, head, :, start:end].reshape(-1, size)
                logits = room[: len(rows) * seen].view(len(rows), seen)
                if rows.dtype == logits.dtype:
                    torch.mm(rows, key[row, head, :seen].T, out=logits)
                else:
                    logits.copy_(rows @ key[row, head, :seen].T)
                if softcap is not None:
                    logits.div_(softcap).tanh_().mul_(softcap)
                _hide(logits.view(groups, end - start, seen), mask, row, share, start)
                weights = _softmax(logits, None if sinks is None else sinks[share])
                if mask is not None:
                    weights.nan_to_num_(0.0)
                attended = weights.to(value.dtype) @ value[row, head, :seen]
                out[row, head, :, start:end] = attended.view(groups, end - start, -1)
                voters = weights.new_ones(end - start)
                if counted is not None:
                    voters = counted[row, start:end].to(weights.dtype)
                sums[row, head, :seen].addmv_(weights.T, voters.repeat(groups))
    return out.view(batch, query_heads, queries, -1), sums / groups


def _accumulator(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _hide(logits: Tensor, mask: Tensor | None, row: int, heads: slice, start: int) -> None:
    """Masks logits `[G, S, T]` of the queries from `start` on, in place."""
    queries = logits.shape[1]
    if mask is None:
        above = torch.ones(queries, queries, dtype=torch.bool, device=logits.device).triu(1)
        logits[..., -queries:].masked_fill_(above, -torch.inf)
        return
    of_row = mask[row if mask.shape[0] > 1 else 0]
    part = of_row[heads if len(of_row) > 1 else slice(0, 1), start : start + queries]
    if part.dtype == torch.bool:
        logits.masked_fill_(~part, -torch.inf)
    else:
        logits.add_(part)


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Rows `[G·S, T]`, in place; attention sinks `[G]` take their share and leave no column."""
    if sinks is None:
        return torch.softmax(logits, -1, out=logits)
    extra = sinks.to(logits.dtype).repeat_interleave(len(logits) // len(sinks))[:, None]
    return torch.cat([logits, extra], -1).softmax(-1)[:, :-1]
