# SPDX-License-Identifier: Apache-2.0
"""Attention of a prefill inside chunks: its queries and keys wait until their chunk is complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.errors import IllegalComposition
from kvfold.kernels.chunk_attention import chunk_sums
from kvfold.observers.base import Layer, Need, Observer, Rows, filled_up, per_stored_head
from kvfold.observers.call import AttentionCall

NAME = "chunk_sums"


@dataclass(frozen=True)
class ChunkSumsNeed(Need[Tensor]):
    """Attention of a prefill inside chunks: unmasked, unscaled, summed over the chunk's queries.

    `[B, H, T]`, mean over the group; 1, the mean of a chunk, for entries that no chunk holds.
    """

    empty: ClassVar[float | None] = 1.0
    while_reading: ClassVar[bool] = True
    words: ClassVar[str] = "attention inside chunks"
    keyword: ClassVar[str] = "chunk_sums"
    field: ClassVar[str] = "chunk_sums"

    size: int  # tokens of a chunk; the last one of a prefill may be shorter
    first: int = 0  # first tokens of each row, which are in no chunk
    last: int = 0  # last tokens of a prefill, which are a chunk by themselves

    def observer(self, fitted: object = None) -> ChunkSums:
        return ChunkSums(self)

    def joined(self, other: ChunkSumsNeed) -> ChunkSumsNeed:
        if self != other:
            raise IllegalComposition(
                "the methods read attention inside different chunks: use one of them"
            )
        return self


class ChunkSums(Observer[Tensor]):
    """Sums `[B, H, T]` of the chunks that are complete, and the tokens of those that are not."""

    empties: ClassVar[dict[str, float]] = {NAME: 1.0}

    def __init__(self, need: ChunkSumsNeed) -> None:
        super().__init__()
        self.need, self.chunks = need, QueryChunks()

    def fresh(self) -> ChunkSums:
        return ChunkSums(self.need)

    def read_piece(self, layer: Layer, call: AttentionCall) -> None:
        layer.stay()
        query, new = call.query, call.query.shape[2]
        columns = torch.arange(layer.seen - new, layer.seen, device=query.device)
        columns = layer.sequence.real(columns.expand(len(query), 1, -1))
        waits = layer.sequence.positions(columns)[:, 0] >= self.need.first
        self.chunks.add(query, call.key[:, :, call.key.shape[2] - new :], waits)
        self._settle(layer, end=False)

    def last_piece(self, layer: Layer) -> None:
        self._settle(layer, end=True)

    def _settle(self, layer: Layer, end: bool) -> None:
        """Notes the sums of chunks that are complete; all are at the prefill's `end`."""
        completed = self.chunks.complete(self.need, end)
        if completed is None:
            return
        sums, known = per_stored_head(layer, completed[0]), completed[1][:, None]
        whole = self.of(layer, None).clone()
        newest = whole[..., whole.shape[-1] - sums.shape[-1] :]
        newest.copy_(sums.where(known, newest))
        self.numbers[NAME] = whole

    def of(self, layer: Layer, call: AttentionCall | None) -> Tensor:
        store, sums = layer.stored(), self.numbers.get(NAME)
        if sums is None:
            device, shape = store.keys.device, (*store.keys.shape[:2], store.length)
            return torch.ones(shape, dtype=torch.float32, device=device)
        return filled_up(sums, store.length, self.empties[NAME])

    def index(self, rows: Rows) -> None:
        self.chunks.index(rows)

    def nbytes(self) -> int:
        return self.chunks.nbytes()


class OpenChunk(NamedTuple):
    """Tokens of the newest columns; some rows have put the first of them into a chunk already."""

    queries: Tensor  # [B, Hq, n, D]
    keys: Tensor  # [B, H, n, D]
    waits: Tensor  # [B, n], True for a token that no chunk holds yet


class QueryChunks:
    """Tokens of one prefill that wait for their chunk, chunk after chunk in each row by itself."""

    def __init__(self) -> None:
        self.waiting: OpenChunk | None = None

    def add(self, queries: Tensor, keys: Tensor, waits: Tensor) -> None:
        """Adds the queries `[B, Hq, S, D]` and keys `[B, H, S, D]` of the tokens `waits [B, S]`."""
        new = OpenChunk(queries, keys, waits)
        if self.waiting is not None:
            old = self.waiting
            new = OpenChunk(
                torch.cat([old.queries, queries], 2),
                torch.cat([old.keys, keys], 2),
                torch.cat([old.waits, waits], 1),
            )
        self.waiting = new

    def complete(self, need: ChunkSumsNeed, end: bool) -> tuple[Tensor, Tensor] | None:
        """Sums `[B, H, n]` of the newest columns and a mask `[B, n]` of those known from now on.

        At the prefill's `end` the last chunk is complete, and the last tokens are a chunk by
        themselves. None if no token waits.
        """
        if self.waiting is None:
            return None
        queries, keys, waits = self.waiting
        count = waits.sum(-1, keepdim=True)
        inner = (count - need.last).clamp(min=0)
        whole = inner if end else inner // need.size * need.size
        order = (~waits).byte().argsort(dim=-1, stable=True)  # those that wait come first
        known = torch.zeros_like(F.pad(waits, (0, 1)))
        sums = torch.zeros(*keys.shape[:2], known.shape[1], dtype=torch.float32, device=keys.device)
        parts = [(torch.zeros_like(whole), whole, need.size)]
        parts += [(whole, count, need.last)] if end and need.last else []
        for first, stop, size in parts:
            size = min(size, int((stop - first).max()))  # one chunk holds a shorter text
            if size == 0:
                continue
            columns = _laid_out(order, first, stop, size)
            received = chunk_sums(queries, keys, columns, size)
            # Holes write into an extra column, which is cut off.
            columns = columns.masked_fill(columns < 0, known.shape[1] - 1)
            known = known.scatter(1, columns, True)
            sums = sums.scatter(2, columns[:, None].expand_as(received), received)
        self._keep(waits & ~known[:, :-1], end)
        return sums[..., :-1], known[:, :-1]

    def _keep(self, waits: Tensor, end: bool) -> None:
        """Drops the columns before the first that waits in any row, or all at the prefill's end."""
        assert self.waiting is not None
        left = waits.any(0).nonzero()
        if end or not len(left):
            self.waiting = None
            return
        first = int(left[0])
        queries, keys, _ = self.waiting
        # Copies: views would keep the whole piece alive.
        self.waiting = OpenChunk(
            queries[:, :, first:].clone(), keys[:, :, first:].clone(), waits[:, first:].clone()
        )

    def index(self, rows: Rows) -> None:
        """Applies `rows`, a selection along the batch axis."""
        if self.waiting is not None:
            self.waiting = OpenChunk(*map(rows, self.waiting))

    def nbytes(self) -> int:
        """Bytes of the tokens that wait."""
        return sum(t.numel() * t.element_size() for t in self.waiting or ())


def _laid_out(order: Tensor, first: Tensor, stop: Tensor, size: int) -> Tensor:
    """Columns `[B, P]` of the places `first` to `stop [B, 1]` of `order [B, n]`, −1 behind them.

    P is a multiple of `size`.
    """
    most = int((stop - first).max())
    places = first + torch.arange(-(-most // size) * size, device=order.device)
    columns = order.gather(1, places.clamp(max=order.shape[1] - 1))
    return columns.masked_fill(places >= stop, -1)
