# SPDX-License-Identifier: Apache-2.0
"""The same pass over blocks of queries, with the most attention that each chosen entry received."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.chunked import AttentionBlocks, Block, spans


def attend_with_column_maxima(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scored: Tensor,
    counted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.attend_with_column_maxima`, with memory linear in T."""
    blocks = AttentionBlocks(query, key, value, mask, scale, softcap, sinks)
    ranges = [spans(of_row) for of_row in scored]
    maxima, voting = blocks.per_entry(), blocks.voters(counted)
    for at, weights in blocks:
        voters, among = _voters(blocks, at, voting), scored[at.row, : at.seen]
        share = weights.new_zeros(len(weights))
        for part in ranges[at.row]:
            share.addmv_(weights[:, part], among[part].to(weights.dtype))
        # Well above where single weights underflow, or are flushed to zero.
        lost = share < torch.finfo(share.dtype).tiny ** 0.5
        if bool((lost & voters).any()):
            weights, share = _weights_among(blocks, at, among), torch.ones_like(share)
        factor = share.reciprocal_().masked_fill_(~voters, 0.0)[:, None]
        most = maxima[at.row, at.head, : at.seen]
        for part in ranges[at.row]:
            highest = weights[:, part].mul_(factor).amax(0)
            torch.maximum(most[part], highest, out=most[part])
    return blocks.out, maxima.masked_fill_(~scored[:, None], 0.0)


def _voters(blocks: AttentionBlocks, at: Block, voting: Tensor) -> Tensor:
    """Which rows `[G·S]` of a block count, by `voting [B, S]`, and may attend to anything.

    Softmax makes an even row of one that an additive mask forbids everything.
    """
    voters = voting[at.row, at.start : at.end].expand(blocks.groups, -1)
    mask = blocks.mask(at)
    if mask is not None and mask.dtype != torch.bool:
        voters = voters & (mask.amax(-1) > torch.finfo(mask.dtype).min / 2)
    return voters.flatten()


def _weights_among(blocks: AttentionBlocks, at: Block, scored: Tensor) -> Tensor:
    """Rows `[G·S, seen]` of a softmax over `scored [seen]` alone, anew from the logits."""
    logits = blocks.logits(at).masked_fill_(~scored, -torch.inf)
    mask = blocks.mask(at)
    if mask is not None and mask.dtype != torch.bool:
        forbidden = mask <= torch.finfo(mask.dtype).min / 2
        logits.view(blocks.groups, -1, at.seen).masked_fill_(forbidden, -torch.inf)
    return torch.softmax(logits, -1, out=logits).nan_to_num_(0.0)
