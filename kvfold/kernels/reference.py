# SPDX-License-Identifier: Apache-2.0
"""Plain torch, the whole matrix: small inputs only."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """Attention output `[B, Hq, S, Dv]` and the attention each entry received `[B, H, T]`.

    query `[B, Hq, S, D]`, key `[B, H, T, D]`, value `[B, H, T, Dv]`; mask bool or additive
    `[B or 1, Hq or 1, S, T]`, or None for a causal one aligned to the last key. Sums run
    over the queries where `counted [B, S]` is true, mean over the query heads of a group; rows
    with nothing to attend to are 0.
    """
    heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    logits = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if mask is None:
        queries, stored = logits.shape[-2:]
        mask = torch.ones(queries, stored, dtype=torch.bool).tril(stored - queries).to(query.device)
    logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sinks is not None:
        extra = sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        attention = torch.cat([logits, extra], -1).softmax(-1)[..., :-1]
    else:
        attention = logits.softmax(-1)
    attention = attention.nan_to_num(0.0)
    out = attention.to(value.dtype) @ value.repeat_interleave(groups, 1)
    if counted is not None:
        attention = attention * counted[:, None, :, None]
    return out, attention.sum(-2).unflatten(1, (heads, groups)).mean(2)
