# SPDX-License-Identifier: Apache-2.0
"""Attention in blocks of queries, whose softmax rows give output and column sums in one pass.

Reference: `reference.attend_with_moments`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from kvfold.kernels.logits import LogitOptions

BLOCK = 128
# Entries between two ranges worth a cut: another slice costs about as much as these.
GAP = 256
# Below this many queries, looking for hidden entries costs more than masking all of them.
FEW = 16


def attend_with_moments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    counted: Tensor | None = None,
    squares: bool = True,
    **options: Unpack[LogitOptions],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `reference.attend_with_moments`, with memory linear in T.

    The sums of squares are None without `squares`.
    """
    blocks = AttentionBlocks(query, key, value, mask, **options)
    found = blocks.per_entry() if squares else None
    sums = _column_sums(blocks, counted, found)
    return blocks.out, sums, None if found is None else found / blocks.groups**2


def _column_sums(blocks: AttentionBlocks, counted: Tensor | None, squares: Tensor | None) -> Tensor:
    """Column sums `[B, H, T]` over all blocks; adds squared group sums to `squares [B, H, T]`."""
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
    """Queries `start` to `end − 1` of a row and a KV head, and the mask's extent for them.

    None of them sees an entry from `seen` on; the `hidden` slot ranges hold every earlier entry
    that is masked for any of them.
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
    """Attention, one block of queries at a time: iterate once, then `out` is `[B, Hq, S, Dv]`.

    query `[B, Hq, S, D]`, key `[B, H, T, D]`, value `[B, H, T, Dv]`; other arguments as in
    `reference.attend_with_column_sums`. Yields each block with its weights `[G·S, seen]`, head by
    head; they are valid until the next block, and the caller may change them. One KV head at a
    time keeps a block's rows in the processor's cache between softmax and products.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **options: Unpack[LogitOptions],
    ) -> None:
        # The buffer is reused for every block, so gradients are impossible.
        query, self._key, self._value = query.detach(), key.detach(), value.detach()
        self._mask = mask
        self._softcap, self._sink_logits = options.get("softcap"), options.get("sink_logits")
        heads, stored = key.shape[1:3]
        self.groups = query.shape[1] // heads
        self._query = (query * options["scale"]).unflatten(1, (heads, self.groups))
        self.out = query.new_empty(*query.shape[:3], value.shape[-1])
        self._dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        rows = self.groups * min(BLOCK, query.shape[2])
        self._room = query.new_empty(rows * stored, dtype=self._dtype)

    def __iter__(self) -> Iterator[tuple[Block, Tensor]]:
        out = self.out.unflatten(1, (-1, self.groups))
        for at in self._blocks():
            sink_logits = (
                None if self._sink_logits is None else self._sink_logits[self._query_heads(at)]
            )
            weights = _softmax(self.logits(at), sink_logits)
            # A row that sees nothing is all NaN, so one column tells.
            if self._mask is not None and (at.few or bool(weights[:, 0].isnan().any())):
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
        # Most masks hide few entries, at the ends: finding them costs less than masking all.
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
        """Zeros `[B, H, T]` for statistics, float32 or float64."""
        return torch.zeros(self._key.shape[:3], dtype=self._dtype, device=self._key.device)

    def voters(self, counted: Tensor | None) -> Tensor:
        """Bool mask `[B, S]` of the queries that count; `counted` None: all of them."""
        if counted is not None:
            return counted
        shape = len(self._query), self._query.shape[3]
        return torch.ones(shape, dtype=torch.bool, device=self._query.device)

    def logits(self, at: Block) -> Tensor:
        """Masked logits `[G·S, seen]` of a block; overwrites the weights yielded last."""
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

    def masses(self, at: Block, tokens: Tensor, weights: Tensor, entry: int) -> Tensor:
        """Log-sum-exps `[G, n]` of the logits of a block's queries `tokens [n]`, counted in it.

        `weights [G, n, seen]` are theirs: an entry's logit less the logarithm of its weight is the
        log-sum-exp. `entry` is looked at first; −∞ where nothing is visible.
        """
        rows = self._query[at.row, at.head, :, at.start : at.end][:, tokens].to(self._dtype)
        keys = self._key[at.row, at.head].to(self._dtype)
        of_entry = weights[..., entry]
        logits = rows @ keys[entry]
        faint = of_entry < torch.finfo(self._dtype).tiny ** 0.5  # rounded, or flushed to zero
        if bool(faint.any()):
            peak, place = weights[faint].max(-1)
            of_entry = of_entry.masked_scatter(faint, peak)
            logits = logits.masked_scatter(faint, (rows[faint] * keys[place]).sum(-1))
        if self._softcap is not None:
            logits = self._softcap * (logits / self._softcap).tanh()
        return (logits - of_entry.log()).masked_fill(of_entry == 0, -torch.inf)

    def sink_shares(self, at: Block, masses: Tensor) -> Tensor | float:
        """Parts `[G, n]` that sink logits receive of rows with log-sum-exps `masses [G, n]`."""
        if self._sink_logits is None:
            return 0.0
        return (self._sink_logits[self._query_heads(at), None].to(masses.dtype) - masses).exp()

    def mask(self, at: Block) -> Tensor | None:
        """Part `[G or 1, S, seen]` of the mask for a block; None: causal."""
        if self._mask is None:
            return None
        of_row = self._mask[at.row if len(self._mask) > 1 else 0]
        heads = self._query_heads(at) if len(of_row) > 1 else slice(0, 1)
        return of_row[heads, at.start : at.end, : at.seen]


def spans(chosen: Tensor) -> list[slice]:
    """Ranges of slots that cover all true ones of `chosen [T]`; cut at gaps longer than `GAP`."""
    slots = chosen.nonzero().flatten()
    cuts = (slots.diff() > GAP).nonzero().flatten()
    starts = torch.cat([slots[:1], slots[cuts + 1]])
    ends = torch.cat([slots[cuts], slots[-1:]]) + 1
    return [slice(a, b) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


def _hide(logits: Tensor, mask: Tensor | None, ranges: list[slice]) -> None:
    """Masks `ranges` of logits `[G, S, seen]` in place; mask None: causal, one square range."""
    queries = logits.shape[1]
    for part in ranges:
        if mask is None:
            above = torch.ones(queries, queries, dtype=torch.bool, device=logits.device).triu(1)
            logits[..., part].masked_fill_(above, -torch.inf)
        elif mask.dtype == torch.bool:
            logits[..., part].masked_fill_(~mask[..., part], -torch.inf)
        else:
            logits[..., part].add_(mask[..., part])


def _softmax(logits: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Softmax of logits `[G·S, T]`, in place if there are no sink logits.

    Sink logits `[G]` join the denominator and are not returned.
    """
    if sink_logits is None:
        return torch.softmax(logits, -1, out=logits)
    extra = sink_logits.to(logits.dtype).repeat_interleave(len(logits) // len(sink_logits))[:, None]
    return torch.cat([logits, extra], -1).softmax(-1)[:, :-1]
