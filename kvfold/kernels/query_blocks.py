# SPDX-License-Identifier: Apache-2.0
"""One pass over blocks of queries: softmax rows give output and column sums together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
# Another slice costs about as much as this many columns of a block.
GAP = 256
# For fewer queries than this, to look what could be spared takes longer than to do it.
FEW = 16


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
    return blocks.out, sums, squares / blocks.groups**2


def _column_sums(
    blocks: AttentionBlocks, counted: Tensor | None, squares: Tensor | None = None
) -> Tensor:
    """`[B, H, T]`; runs through the blocks, and adds squared group sums to `squares [B, H, T]`."""
    sums = blocks.per_entry()
    voting = blocks.voters(counted).to(sums.dtype)
    for at, weights in blocks:
        voters = voting[at.row, at.start : at.end]
        sums[at.row, at.head, : at.seen].addmv_(weights.T, voters.repeat(blocks.groups))
        if squares is not None:
            of_group, *others = weights.view(blocks.groups, -1, at.seen)
            for of_head in others:
                of_group.add_(of_head)
            squares[at.row, at.head, : at.seen].addmv_(of_group.square_().T, voters)
    return sums / blocks.groups


class Block(NamedTuple):
    """Queries `start` to `end − 1` of a row and a KV head, which see its first `seen` entries.

    What is hidden from any of them lies in the columns `hidden`.
    """

    row: int
    head: int
    start: int
    end: int
    seen: int
    hidden: list[slice]

    @property
    def few(self) -> bool:
        return self.end - self.start < FEW


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
            if self._mask is not None and (at.few or _has_blind_row(weights)):
                weights.nan_to_num_(0.0)
            attended = weights.to(self._value.dtype) @ self._value[at.row, at.head, : at.seen]
            out[at.row, at.head, :, at.start : at.end] = attended.view(
                self.groups, at.end - at.start, -1
            )
            yield at, weights

    def _blocks(self) -> Iterator[Block]:
        batch, heads = self._key.shape[:2]
        starts = range(0, self._query.shape[3], BLOCK)
        alike = self._mask is None or self._mask.shape[1] == 1
        for row in range(batch):
            first = [self._block(row, 0, start) for start in starts]
            for head in range(heads):
                for at in first:
                    same = head == 0 or alike
                    yield at._replace(head=head) if same else self._block(row, head, at.start)

    def _block(self, row: int, head: int, start: int) -> Block:
        queries, stored = self._query.shape[3], self._key.shape[2]
        end = min(start + BLOCK, queries)
        whole = Block(row, head, start, end, stored, [slice(0, stored)])
        mask = self.mask(whole)
        if mask is None:
            # A causal block sees the keys up to its own last query.
            seen = stored - queries + end
            return whole._replace(seen=seen, hidden=[slice(seen - (end - start), seen)])
        if whole.few:
            return whole
        # Most masks hide little and at the ends, and applying them costs more than this look.
        is_bool = mask.dtype == torch.bool
        nothing, all_of_it = (0, 1) if is_bool else (-torch.inf, 0)
        of_rows = mask.view(torch.uint8) if is_bool else mask
        low, high = of_rows.amin((0, 1)), of_rows.amax((0, 1))
        seen = max([part.stop for part in spans(high > nothing)], default=1)
        changed = (low != all_of_it) | (high != all_of_it)
        return whole._replace(seen=seen, hidden=spans(changed[:seen]))

    def _query_heads(self, at: Block) -> slice:
        return slice(at.head * self.groups, (at.head + 1) * self.groups)

    def per_entry(self) -> Tensor:
        """Zeros `[B, H, T]` to gather statistics in."""
        return torch.zeros(self._key.shape[:3], dtype=self._dtype, device=self._key.device)

    def voters(self, counted: Tensor | None) -> Tensor:
        """Which queries count, bool `[B, S]`; None: all of them."""
        if counted is not None:
            return counted
        shape = len(self._query), self._query.shape[3]
        return torch.ones(shape, dtype=torch.bool, device=self._query.device)

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
        _hide(logits.view(self.groups, -1, at.seen), self.mask(at), at.hidden)
        return logits

    def mask(self, at: Block) -> Tensor | None:
        """The part `[G or 1, S, seen]` of the mask that is about a block; None: causal."""
        if self._mask is None:
            return None
        of_row = self._mask[at.row if len(self._mask) > 1 else 0]
        heads = self._query_heads(at) if len(of_row) > 1 else slice(0, 1)
        return of_row[heads, at.start : at.end, : at.seen]


def spans(chosen: Tensor) -> list[slice]:
    """Ranges that hold all that is true in `chosen [T]`, and as little else as is worth a cut."""
    places = chosen.nonzero().flatten()
    cuts = (places.diff() > GAP).nonzero().flatten()
    starts = torch.cat([places[:1], places[cuts + 1]])
    ends = torch.cat([places[cuts], places[-1:]]) + 1
    return [slice(a, b) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


def _hide(logits: Tensor, mask: Tensor | None, columns: list[slice]) -> None:
    """Masks columns of logits `[G, S, seen]` in place; None: causal, in one square."""
    queries = logits.shape[1]
    for part in columns:
        if mask is None:
            above = torch.ones(queries, queries, dtype=torch.bool, device=logits.device).triu(1)
            logits[..., part].masked_fill_(above, -torch.inf)
        elif mask.dtype == torch.bool:
            logits[..., part].masked_fill_(~mask[..., part], -torch.inf)
        else:
            logits[..., part].add_(mask[..., part])


def _has_blind_row(weights: Tensor) -> bool:
    """Whether a row sees nothing: it is then NaN throughout, so one column tells."""
    return bool(weights[:, 0].isnan().any())


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Rows `[G·S, T]`, in place; attention sinks `[G]` take their share and leave no column."""
    if sinks is None:
        return torch.softmax(logits, -1, out=logits)
    extra = sinks.to(logits.dtype).repeat_interleave(len(logits) // len(sinks))[:, None]
    return torch.cat([logits, extra], -1).softmax(-1)[:, :-1]
