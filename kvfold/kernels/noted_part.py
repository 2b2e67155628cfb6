# SPDX-License-Identifier: Apache-2.0
"""Attention to a part of all entries, noted while blocks of queries attend to all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.kernels.partial_attention import PartOutput
from kvfold.kernels.query_blocks import AttentionBlocks, Block


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
