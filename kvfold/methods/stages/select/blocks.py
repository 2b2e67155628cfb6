# SPDX-License-Identifier: Apache-2.0
"""Selection inside blocks of consecutive entries: each keeps its share (LagKV, Finch)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.rounding import ROUNDING
from kvfold.methods.stages.select.top import top, with_forced


def best_of_blocks(
    observation: Observation,
    scores: Tensor,
    forced: Tensor,
    positions: Tensor,
    counts: Tensor,
    first: int,
    block: int,
) -> Tensor:
    """Slots `[B, H, K]` of the newest entries and of the best of each earlier block.

    Blocks of `block` stored entries follow the `first` ones. From the last complete block on all
    entries are kept, the newest first; the blocks before it share what is left of `counts [B, H]`
    in proportion to their entries that are not forced. scores, forced and positions `[B, H, T]`.
    """
    real = positions >= 0
    index = real.cumsum(-1) - 1
    block_of = (index - first).div(block, rounding_mode="floor")
    earlier = ((real.sum(-1, keepdim=True) - first) // block - 1).clamp(min=0)
    inside = real & ~forced & (block_of >= 0) & (block_of < earlier)
    newest = real & ~forced & ~inside
    most = int(earlier.max())
    block_of = block_of.masked_fill(~inside, most)
    sizes = torch.zeros_like(block_of[..., :1].expand(*earlier.shape[:2], most + 1))
    sizes = sizes.scatter_add(2, block_of, inside.long())[..., :most]
    left = (counts - forced.sum(-1) - newest.sum(-1)).clamp(min=0)
    kept = torch.nn.functional.pad(proportional(left, sizes), (0, 1)).gather(2, block_of)
    chosen = _ranks(scores.masked_fill(~inside, -torch.inf), block_of, sizes) < kept
    order = torch.where(newest, index + 1, chosen.long() - 1).to(scores.dtype)
    return top(with_forced(order, forced, positions), counts)


def best_of_chunks(
    observation: Observation,
    scores: Tensor,
    forced: Tensor,
    positions: Tensor,
    counts: Tensor,
    length: int,
) -> Tensor:
    """Slots `[B, H, K]` of forced entries and of the same part of each chunk of `length` tokens.

    Chunks share what forced entries leave of `counts [B, H]` in proportion to their entries that
    are not forced. scores, forced and positions `[B, H, T]`. Ascending, −1 for holes.
    """
    open_ = (positions >= 0) & ~forced
    chunks = int(positions.max().clamp(min=0)) // length + 1
    chunk_of = (positions // length).masked_fill(~open_, chunks)
    sizes = chunk_of.new_zeros(*chunk_of.shape[:2], chunks + 1)
    sizes = sizes.scatter_add(2, chunk_of, open_.long())[..., :chunks]
    shares = proportional((counts - forced.sum(-1)).clamp(min=0), sizes)
    kept = torch.nn.functional.pad(shares, (0, 1)).gather(2, chunk_of)
    chosen = _ranks(scores.masked_fill(~open_, -torch.inf), chunk_of, sizes) < kept
    return top(with_forced(chosen.to(scores.dtype), forced, positions), counts)


def proportional(totals: Tensor, sizes: Tensor) -> Tensor:
    """Integers `[B, H, N]` near `totals [B, H]` in proportion to `sizes`, by largest remainder.

    Of equal remainders the earlier is rounded up. None exceeds its size.
    """
    whole = sizes.sum(-1, keepdim=True)
    shares = torch.minimum(totals[..., None], whole).double() * sizes / whole.clamp(min=1)
    counts = (shares + ROUNDING).long()
    missing = torch.minimum(totals[..., None], whole) - counts.sum(-1, keepdim=True)
    order = (counts - shares).argsort(dim=-1, stable=True)
    first = (torch.arange(sizes.shape[-1], device=sizes.device) < missing).long()
    return counts.scatter_add(-1, order, first.expand_as(order))


def _ranks(scores: Tensor, block_of: Tensor, sizes: Tensor) -> Tensor:
    """Ranks `[B, H, T]` of scores inside their block, 0 for the highest, the earlier of equal."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(2, block_of.gather(2, order).argsort(dim=-1, stable=True))
    starts = torch.nn.functional.pad(sizes, (1, 0)).cumsum(-1)
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.zeros_like(order).scatter(2, order, place) - starts.gather(2, block_of)
