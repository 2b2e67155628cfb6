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

from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.partial_attention import PartOutput
from kvfold.kernels.query_blocks import BLOCK, AttentionBlocks, Block, spans


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

    Fills `part`, except in two separate passes, whose weights are not known, and in half precision,
    where an output is too coarse to take a part of it away.
    """
    by_group = None if column_weights is None else column_weights.unflatten(1, (key.shape[1], -1))
    scale = options["scale"]
    bare = options.get("softcap") is None and options.get("sink_logits") is None
    plain = bare and counted is None
    # Two separate passes read the scored keys twice: faster while these are under half of all.
    if plain and 2 * int(scored.sum(-1).max()) < key.shape[2] and _follow(query, key, value, mask):
        maxima = _maxima_apart(query, key, scale, scored, row_weights, by_group, rms)
        maxima = _root_of_mean(maxima, query, counted) if rms else maxima
        return _attend_apart(query, key, value, scale), maxima
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


def _follow(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """True if the CPU's flash kernel can attend: float32, causal, queries at the end of the keys.

    Some entries must precede the queries' own, and nothing but causality may hide any.
    """
    queries, earlier = query.shape[2], key.shape[2] - query.shape[2]
    if query.device.type != "cpu" or query.dtype != torch.float32 or earlier <= 0:
        return False
    if key.shape[3] != value.shape[3]:
        return False
    if mask is None:
        return True
    causal = torch.ones(queries, queries, dtype=torch.bool).tril()
    return mask.dtype == torch.bool and bool(
        mask[..., :earlier].all() and (mask[..., earlier:] == causal).all()
    )


def _attend_apart(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention output `[B, Hq, S, D]` from two flash calls: earlier entries, the queries' own.

    Both are joined by their log-sum-exps.
    """
    flash = torch._scaled_dot_product_flash_attention_for_cpu
    batch, heads, stored, size = key.shape
    query_heads, queries = query.shape[1:3]
    earlier, groups = stored - queries, query_heads // heads
    # Every query sees all earlier entries, so a group's queries can be rows of one head.
    rows = query.reshape(batch, heads, groups * queries, size)
    before, total_before = flash(rows, key[:, :, :earlier], value[:, :, :earlier], scale=scale)
    own_keys, own_values = (
        entries[:, :, earlier:].repeat_interleave(groups, 1) for entries in (key, value)
    )
    own, total_own = flash(query, own_keys, own_values, is_causal=True, scale=scale)
    share = (total_before.reshape(total_own.shape) - total_own).sigmoid_()
    return torch.lerp(own, before.reshape(query.shape), share[..., None])


def _maxima_apart(
    query: Tensor,
    key: Tensor,
    scale: float,
    scored: Tensor,
    row_weights: Tensor | None,
    column_weights: Tensor | None,
    rms: bool,
) -> Tensor:
    """Maxima `[B, H, T]` of softmax rows over the `scored [B, T]` entries alone.

    Weights are `row_weights [B, S]` and `column_weights [B, H, G, T]`, or None. Sums of squares
    with `rms`.
    """
    earlier = key.shape[2] - query.shape[2]
    grouped = (query * scale).unflatten(1, (key.shape[1], -1))
    maxima = key.new_zeros(key.shape[:3])
    for row, of_row in enumerate(scored):
        columns = of_row.nonzero().flatten()
        keys = key[row].index_select(1, columns)
        of_row = None if row_weights is None else row_weights[row].to(keys.dtype)
        of_keys = None if column_weights is None else column_weights[row][..., columns]
        weights = of_row, of_keys
        received = _maxima_of_row(grouped[row], keys, columns - earlier, *weights, rms)
        maxima[row, :, columns] = received
    return maxima


def _maxima_of_row(
    query: Tensor,
    keys: Tensor,
    first_seen_by: Tensor,
    row_weights: Tensor | None,
    column_weights: Tensor | None,
    rms: bool,
) -> Tensor:
    """Maxima `[H, K]` that keys `[H, K, D]` receive from queries `[H, G, S, D]` of one row.

    With `rms` sums of squares. Key k is visible from query `first_seen_by[k]` on, below 0 to all
    queries; `[K]`, ascending. Weights are `row_weights [S]` and `column_weights [H, G, K]`, or
    None.
    """
    queries, most = query.shape[2], keys.new_zeros(keys.shape[:2])
    room = keys.new_empty(query.shape[1] * min(BLOCK, queries) * len(first_seen_by))
    for start in range(0, queries, BLOCK):
        end = min(start + BLOCK, queries)
        whole, seen = (int((first_seen_by < first).sum()) for first in (start, end))
        if not seen:
            continue
        later = first_seen_by[whole:seen] > torch.arange(start, end)[:, None]
        for head, (of_head, highest) in enumerate(zip(keys, most, strict=True)):
            rows = query[head, :, start:end].flatten(0, 1)
            weights = room[: len(rows) * seen].view(-1, seen)
            torch.mm(rows, of_head[:seen].T, out=weights)
            by_query_head = weights.view(-1, end - start, seen)
            by_query_head[..., whole:].masked_fill_(later, -torch.inf)
            torch.softmax(weights, -1, out=weights)
            if whole == 0:
                weights.nan_to_num_(0.0)  # rows that see no scored entry
            if row_weights is not None:
                by_query_head.mul_(row_weights[start:end, None])
            of_columns = None if column_weights is None else column_weights[head, :, :seen]
            _gather(highest[:seen], weights, of_columns, rms)
    return most


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
