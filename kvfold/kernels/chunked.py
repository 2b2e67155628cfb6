# SPDX-License-Identifier: Apache-2.0
"""One pass over blocks of queries: softmax rows give output and column sums together."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64


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
    """As `reference.attend_with_column_sums`, with memory linear in T."""
    batch, query_heads, queries, size = query.shape
    heads, stored = key.shape[1:3]
    groups = query_heads // heads
    out = query.new_empty(batch, heads, groups, queries, value.shape[-1])
    sums = torch.zeros(batch, heads, stored, dtype=torch.float32, device=query.device)
    packed = (query * scale).view(batch, heads, groups, queries, size)
    keys = key.transpose(-1, -2)
    offset = stored - queries
    for start in range(0, queries, BLOCK):
        end = min(start + BLOCK, queries)
        block = end - start
        # A causal block sees the keys up to its own last query.
        visible = offset + end if mask is None else stored
        rows = packed[:, :, :, start:end].reshape(batch, heads, groups * block, size)
        logits = torch.matmul(rows, keys[..., :visible]).view(batch, heads, groups, block, visible)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if mask is None:
            above = torch.ones(block, block, dtype=torch.bool, device=query.device).triu(1)
            logits[..., offset + start :].masked_fill_(above, -torch.inf)
        else:
            logits = _masked(logits, mask[:, :, start:end], heads)
        attention = _softmax(logits, sinks, heads)
        if mask is not None:
            attention = attention.nan_to_num(0.0)
        weights = attention.to(value.dtype).view(batch, heads, groups * block, visible)
        attended = torch.matmul(weights, value[:, :, :visible])
        out[:, :, :, start:end] = attended.view(batch, heads, groups, block, -1)
        if counted is not None:
            attention = attention * counted[:, None, None, start:end, None]
        sums[..., :visible] += attention.flatten(2, 3).sum(2)
    return out.view(batch, query_heads, queries, -1), sums / groups


def _masked(logits: Tensor, mask: Tensor, heads: int) -> Tensor:
    """Logits `[B, H, G, S, T]` under a bool or additive mask `[B, 1 or Hq, S, T]`."""
    split = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (heads, -1))
    return logits.masked_fill(~split, -torch.inf) if mask.dtype == torch.bool else logits + split


def _softmax(logits: Tensor, sinks: Tensor | None, heads: int) -> Tensor:
    """Rows in float32; attention sinks take their share and leave no column."""
    if sinks is None:
        return logits.softmax(-1, dtype=torch.float32)
    extra = sinks.float().view(1, heads, -1, 1, 1).expand(*logits.shape[:4], 1)
    return torch.cat([logits.float(), extra], -1).softmax(-1)[..., :-1]
