# SPDX-License-Identifier: Apache-2.0
"""One pass over blocks of queries: softmax rows give output and column sums together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    """As `reference.attend_with_column_sums`, with memory linear in T."""
    blocks = AttentionBlocks(query, key, value, mask, scale, softcap, sinks)
    sums = _column_sums(blocks, counted)
    return blocks.out, sums


def attend_with_moments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    counted: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.attend_with_moments`, with memory linear in T."""
    blocks = AttentionBlocks(query, key, value, mask, scale, softcap, sinks)
    squares = blocks.per_entry()
    sums = _column_sums(blocks, counted, squares)
    return blocks.out, sums, squares


def _column_sums(
    blocks: AttentionBlocks, counted: Tensor | None, squares: Tensor | None = None
) -> Tensor:
    """`[B, H, T]`; runs through the blocks, and adds to `squares [B, H, T]` on the way."""
    sums = blocks.per_entry()
    for at, weights in blocks:
        voters = at.counted(counted).to(weights)
        sums[at.row, at.head, : at.seen].addmv_(weights.T, voters.repeat(blocks.groups))
        if squares is not None:
            of_group = weights.view(blocks.groups, -1, at.seen).mean(0)
            squares[at.row, at.head, : at.seen].addmv_(of_group.square_().T, voters)
    return sums / blocks.groups


@dataclass(frozen=True)
class Block:
    """Queries `start` to `end − 1` of a row and a KV head, which see its first `seen` entries."""

    row: int
    head: int
    start: int
    end: int
    seen: int

    def counted(self, counted: Tensor | None) -> Tensor:
        """Which of the queries count, `[end − start]` of `[B, S]`; None: all of them."""
        if counted is None:
            return torch.ones(self.end - self.start, dtype=torch.bool)
        return counted[self.row, self.start : self.end]


class AttentionBlocks:
    """Attention, a block of queries at a time: iterate once, then `out` is `[B, Hq, S, Dv]`.

    Yields each block with its weights `[G·S, seen]`, head by head, which last until the next; the
    caller may change them. One KV head at a time, so that a block of rows stays in the processor's
    cache between its softmax and the products that use it.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        # Buffers are reused, so nothing here can be differentiated.
        query, self._key, self._value = query.detach(), key.detach(), value.detach()
        self._mask, self._softcap, self._sinks = mask, softcap, sinks
        heads, stored = key.shape[1:3]
        self.groups = query.shape[1] // heads
        self._query = (query * scale).unflatten(1, (heads, self.groups))
        self.out = query.new_empty(*query.shape[:3], value.shape[-1])
        self._dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        rows = self.groups * min(BLOCK, query.shape[2])
        self._room = query.new_empty(rows * stored, dtype=self._dtype)

    def __iter__(self) -> Iterator[tuple[Block, Tensor]]:
        out = self.out.unflatten(1, (-1, self.groups))
        for at in self._blocks():
            sinks = None if self._sinks is None else self._sinks[self._query_heads(at)]
            weights = _softmax(self.logits(at), sinks)
            if self._mask is not None:
                weights.nan_to_num_(0.0)
            attended = weights.to(self._value.dtype) @ self._value[at.row, at.head, : at.seen]
            out[at.row, at.head, :, at.start : at.end] = attended.view(
                self.groups, at.end - at.start, -1
            )
            yield at, weights

    def _blocks(self) -> Iterator[Block]:
        batch, heads, stored = self._key.shape[:3]
        queries = self._query.shape[3]
        for row in range(batch):
            for head in range(heads):
                for start in range(0, queries, BLOCK):
                    end = min(start + BLOCK, queries)
                    # A causal block sees the keys up to its own last query.
                    seen = stored - queries + end if self._mask is None else stored
                    yield Block(row, head, start, end, seen)

    def _query_heads(self, at: Block) -> slice:
        return slice(at.head * self.groups, (at.head + 1) * self.groups)

    def per_entry(self) -> Tensor:
        """Zeros `[B, H, T]` to gather statistics in."""
        return torch.zeros(self._key.shape[:3], dtype=self._dtype, device=self._key.device)

    def logits(self, at: Block) -> Tensor:
        """Masked logits `[G·S, seen]` of a block, in the place of the last weights yielded."""
        rows = self._query[at.row, at.head, :, at.start : at.end].flatten(0, 1)
        keys = self._key[at.row, at.head, : at.seen]
        logits = self._room[: len(rows) * at.seen].view(len(rows), at.seen)
        if rows.dtype == logits.dtype:
            torch.mm(rows, keys.T, out=logits)
        else:
            logits.copy_(rows @ keys.T)
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        _hide(logits.view(self.groups, -1, at.seen), self.mask(at))
        return logits

    def mask(self, at: Block) -> Tensor | None:
        """The part `[G or 1, S, T]` of the mask that is about a block; None: causal."""
        if self._mask is None:
            return None
        of_row = self._mask[at.row if len(self._mask) > 1 else 0]
        heads = self._query_heads(at) if len(of_row) > 1 else slice(0, 1)
        return of_row[heads, at.start : at.end]


def _hide(logits: Tensor, mask: Tensor | None) -> None:
    """Masks logits `[G, S, T]` in place; None hides from each query the keys after its own."""
    if mask is None:
        queries = logits.shape[1]
        above = torch.ones(queries, queries, dtype=torch.bool, device=logits.device).triu(1)
        logits[..., -queries:].masked_fill_(above, -torch.inf)
    elif mask.dtype == torch.bool:
        logits.masked_fill_(~mask, -torch.inf)
    else:
        logits.add_(mask)


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Rows `[G·S, T]`, in place; attention sinks `[G]` take their share and leave no column."""
    if sinks is None:
        return torch.softmax(logits, -1, out=logits)
    extra = sinks.to(logits.dtype).repeat_interleave(len(logits) // len(sinks))[:, None]
    return torch.cat([logits, extra], -1).softmax(-1)[:, :-1]
