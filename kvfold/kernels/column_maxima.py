# SPDX-License-Identifier: Apache-2.0
"""Attention in blocks of queries, and the weights that each scored entry receives (KVzip).

Of these the maximum is taken, or the root of the mean square.

Reference: `reference.attend_with_column_maxima`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from kvfold.kernels.dispatch import columns_in_cpp
from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.native import columns as native
from kvfold.kernels.partial_attention import PartOutput
from kvfold.kernels.query_blocks import AttentionBlocks, Block, spans


def attend_with_column_maxima(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scored: Tensor,
    counted: Tensor | None = None,
    row_weights: Tensor | None = None,
    column_weights: Tensor | None = None,
    rms: bool = False,
    part: NotedPart | None = None,
    **options: Unpack[LogitOptions],
) -> tuple[Tensor, Tensor]:
    """As `reference.attend_with_column_maxima`, with memory linear in T.

    Fills `part`, except in half precision, where an output is too coarse to take a part of it away.
    """
    if part is None and columns_in_cpp(query, key, value, mask, **options):
        out, maxima = native.column_maxima(
            query,
            key,
            value,
            mask,
            scale=options["scale"],
            scored=scored,
            counted=counted,
            row_weights=row_weights,
            column_weights=column_weights,
            rms=rms,
        )
        return out, _root_of_mean(maxima, query, counted) if rms else maxima
    by_group = None if column_weights is None else column_weights.unflatten(1, (key.shape[1], -1))
    blocks = AttentionBlocks(query, key, value, mask, **options)
    part = part if value.dtype in (torch.float32, torch.float64) else None
    if part is not None:
        part.begin(blocks, value)
    ranges = [spans(of_row) for of_row in scored]
    maxima, voting = blocks.per_entry(), blocks.voters(counted)
    for at, weights in blocks:
        if part is not None:
            part.add(blocks, at, weights)
        voters, among = _voters(blocks, at, voting), scored[at.row, : at.seen]
        share = weights.new_zeros(len(weights))
        for own in ranges[at.row]:
            share.addmv_(weights[:, own], among[own].to(weights.dtype))
        # Well above where single weights underflow, or are flushed to zero.
        lost = share < torch.finfo(share.dtype).tiny ** 0.5
        if bool((lost & voters).any()):
            weights, share = _weights_among(blocks, at, among), torch.ones_like(share)
        factor = share.reciprocal_().masked_fill_(~voters, 0.0)
        if row_weights is not None:
            factor.mul_(row_weights[at.row, at.start : at.end].repeat(blocks.groups))
        of_columns = None if by_group is None else by_group[at.row, at.head, :, : at.seen]
        most = maxima[at.row, at.head, : at.seen]
        for own in ranges[at.row]:
            of_own = None if of_columns is None else of_columns[:, own]
            _gather(most[own], weights[:, own].mul_(factor[:, None]), of_own, rms)
    maxima.masked_fill_(~scored[:, None], 0.0)
    return blocks.out, _root_of_mean(maxima, query, counted) if rms else maxima


def _gather(into: Tensor, weights: Tensor, column_weights: Tensor | None, rms: bool) -> None:
    """Maximum of `into [K]` and `weights [G·S, K]`, in place; with `rms` adds their squares.

    Each query head's weights are multiplied by its `column_weights [G, K]`.
    """
    groups = 1 if column_weights is None else len(column_weights)
    by_head = weights.unflatten(0, (groups, -1))
    of_heads = by_head.square().sum(1) if rms else by_head.amax(1)
    if column_weights is not None:
        factor = column_weights.to(weights.dtype)
        of_heads = of_heads * (factor.square() if rms else factor)
    if rms:
        into.add_(of_heads.sum(0))
    else:
        torch.maximum(into, of_heads.amax(0), out=into)


def _root_of_mean(squares: Tensor, query: Tensor, counted: Tensor | None) -> Tensor:
    """Roots of means `[B, H, T]` from sums of squares over a group's `counted [B, S]` queries."""
    rows, query_heads, queries, _ = query.shape
    count = squares.new_full((rows,), queries) if counted is None else counted.sum(-1)
    groups = query_heads // squares.shape[1]
    return (squares / (groups * count.clamp(min=1)).view(-1, 1, 1)).sqrt()


def _voters(blocks: AttentionBlocks, at: Block, voting: Tensor) -> Tensor:
    """Mask `[G·S]` of a block's rows that count by `voting [B, S]` and see at least one entry.

    A row that an additive mask hides completely comes out of softmax as uniform weights.
    """
    voters = voting[at.row, at.start : at.end].expand(blocks.groups, -1)
    mask = blocks.mask(at)
    if mask is not None and mask.dtype != torch.bool:
        voters = voters & (mask.amax(-1) > torch.finfo(mask.dtype).min / 2)
    return voters.flatten()


def _weights_among(blocks: AttentionBlocks, at: Block, scored: Tensor) -> Tensor:
    """Softmax rows `[G·S, seen]` over the `scored [seen]` entries alone, from fresh logits."""
    logits = blocks.logits(at).masked_fill_(~scored, -torch.inf)
    mask = blocks.mask(at)
    if mask is not None and mask.dtype != torch.bool:
        forbidden = mask <= torch.finfo(mask.dtype).min / 2
        logits.view(blocks.groups, -1, at.seen).masked_fill_(forbidden, -torch.inf)
    return torch.softmax(logits, -1, out=logits).nan_to_num_(0.0)


class NotedPart:
    """Attention of the queries of some `tokens [B, n]` to the entries of rows' `ranges`.

    Tokens ascend; −1, which stands for none, comes first.
    Empty until `attend_with_column_maxima` has filled it. The other entries are summed up, as they
    are fewer: their `shares [B, H, G, n]` of the attention, and `outs [B, H, G, n, Dv]`, outputs
    times these shares. `masses [B, H, G, n]` are the log-sum-exps of the logits of all entries.
    """

    def __init__(self, ranges: Sequence[slice], tokens: Tensor) -> None:
        self.ranges, self.tokens, self.filled = ranges, tokens, False
        self._places: list[list[int]] = tokens.tolist()

    def begin(self, blocks: AttentionBlocks, value: Tensor) -> None:
        """Makes room for what `add` fills in."""
        shape = *value.shape[:2], blocks.groups, self.tokens.shape[1]
        self.shares, self.masses = (blocks.per_entry().new_zeros(shape) for _ in range(2))
        self.outs, self._value = self.shares.new_zeros(*shape, value.shape[3]), value
        self.filled = True

    def add(self, blocks: AttentionBlocks, at: Block, weights: Tensor) -> None:
        """Adds a block's `weights [G·S, seen]`."""
        places = self._places[at.row]
        first, last = (bisect_left(places, token) for token in (at.start, at.end))
        if first == last:
            return
        own, by_head = (
            self.tokens[at.row, first:last] - at.start,
            weights.view(blocks.groups, -1, at.seen),
        )
        if last - first < by_head.shape[1]:
            by_head = by_head[:, own]
        given, place = self.ranges[at.row], (at.row, at.head, slice(None), slice(first, last))
        for entries in (slice(0, given.start), slice(given.stop, at.seen)):
            if entries.start < entries.stop:
                part, values = by_head[..., entries], self._value[at.row, at.head, entries]
                self.shares[place] += part.sum(-1)
                self.outs[place] += part @ values
        masses = blocks.masses(at, own, by_head, min(given.start, at.seen - 1))
        self.shares[place] += blocks.sink_shares(at, masses)
        self.masses[place] = masses

    def of_rows(self, out: Tensor) -> tuple[PartOutput, PartOutput]:
        """The part, and all else, `[B, H, n·G, …]`, token by token; `out [B, Hq, S, Dv]` is all."""
        whole, parts = pick_queries(out, self.tokens).unflatten(1, self.shares.shape[1:3]), []
        for share, outs in ((1 - self.shares, whole - self.outs), (self.shares, self.outs)):
            share = share.clamp(min=torch.finfo(share.dtype).eps)  # less is rounding
            each = outs / share[..., None], self.masses + share.log()
            parts.append(PartOutput(*(x.transpose(2, 3).flatten(2, 3) for x in each)))
        return parts[0], parts[1]


def pick_queries(of_queries: Tensor, tokens: Tensor) -> Tensor:
    """Those of `of_queries [B, Hq, S, D]` at each row's `tokens [B, n]`; of −1, any."""
    return torch.stack([own[:, at] for own, at in zip(of_queries, tokens, strict=True)])
