# SPDX-License-Identifier: Apache-2.0
"""Masks of stored entries, from the model's logical masks over all columns."""

from __future__ import annotations

import torch
from torch import Tensor


def visible(mask: Tensor) -> Tensor:
    """Bool mask, True where the bool or additive `mask` shows a column."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def valid_columns(mask: Tensor) -> Tensor | None:
    """Bool mask `[B, N]` of the token columns in a logical mask `[B, ·, S, N]`; None: all."""
    valid = visible(mask[:, 0, -1])
    # A copy: a view would keep the whole mask alive.
    return None if bool(valid.all()) else valid.clone()


def physical_mask(
    mask: Tensor | None, columns: Tensor | None, query: Tensor, seen: int, holes: bool | None = None
) -> Tensor | None:
    """Mask of stored entries `[B, Hq, S, T]` from a logical mask `[B, 1 or Hq, S, N]`.

    `columns [B, H, T]` are the columns of the stored keys, None while slot i is column i; the
    last of the `query [B, Hq, S, D]` is at column `seen − 1`. `holes` is true if any column is −1;
    None: unknown. A result of None means causal.
    """
    if columns is None:
        return mask
    batch, heads, stored = columns.shape
    query_heads, new = query.shape[1:3]
    if holes is None:
        holes = bool((columns < 0).any())
    if mask is None and new == 1 and not holes:
        return None
    if new > 1 and not holes and _only_causal(mask, new, seen):
        # Every query sees all older entries, so the columns that each head has kept do not matter.
        causal = _lower_right(new, stored, columns.device)[None, None]
        if mask is None or mask.dtype == torch.bool:
            return causal
        added = torch.zeros(causal.shape, dtype=mask.dtype, device=mask.device)
        return added.masked_fill_(~causal, torch.finfo(mask.dtype).min)
    groups = query_heads // heads
    per_query = columns.long()[:, :, None].expand(batch, heads, new, stored)
    if mask is not None:
        if mask.shape[1] > 1:
            per_query = per_query.repeat_interleave(groups, 1)
        per_head = mask.expand(batch, per_query.shape[1], new, -1)
        physical = per_head.gather(-1, per_query.clamp(min=0))
    elif new > 1:
        physical = per_query <= torch.arange(seen - new, seen, device=per_query.device)[:, None]
    else:
        physical = torch.ones_like(per_query, dtype=torch.bool)
    if physical.shape[1] != query_heads:
        physical = physical.repeat_interleave(groups, 1)
    hole = (columns < 0).repeat_interleave(groups, 1)[:, :, None]
    nothing = False if physical.dtype == torch.bool else torch.finfo(physical.dtype).min
    return physical.masked_fill(hole, nothing)


def biased(mask: Tensor | None, bias: Tensor, query: Tensor) -> Tensor:
    """Additive mask `[B, Hq, S, T]` of the query's dtype: the bias `[B, H, T]` where visible.

    `mask [B or 1, Hq or 1, S, T]` is that of `physical_mask`.
    """
    query_heads, new = query.shape[1:3]
    per_query = bias.to(query.dtype).repeat_interleave(query_heads // bias.shape[1], 1)[:, :, None]
    if mask is None:
        mask = _lower_right(new, bias.shape[-1], bias.device)[None, None]
    lowest = torch.finfo(query.dtype).min
    if mask.dtype == torch.bool:
        return torch.where(mask, per_query, lowest)
    return torch.where(mask > lowest / 2, mask + per_query, mask)


def _only_causal(mask: Tensor | None, new: int, seen: int) -> bool:
    """True if a logical mask is causal for the last `new` tokens, and hides nothing else."""
    if mask is None:
        return True
    if mask.shape[1] > 1:
        return False
    visible = mask if mask.dtype == torch.bool else mask == 0
    return bool((visible == _lower_right(new, seen, mask.device)).all())


def _lower_right(new: int, stored: int, device: torch.device) -> Tensor:
    """Causal mask `[S, T]` of queries that are the last S stored entries."""
    return torch.ones(new, stored, dtype=torch.bool, device=device).tril(stored - new)
