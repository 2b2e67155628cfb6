# SPDX-License-Identifier: Apache-2.0
"""Reference queries, that entries are fitted to: of a prefill's tokens, or of their repetition."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.kernels.partial_attention import PartOutput
from kvfold.observers.base import Layer, Need, Needs, Observer, Rows
from kvfold.observers.call import AttentionCall
from kvfold.observers.reconstruction import ContextReconstruction

HELD = 8  # every 8th reference token judges the fit, and takes no part in it


@dataclass(frozen=True)
class References:
    """Queries that stand for those to come, and what they attend to beside the entries.

    Their axis n is token by token, with the `groups` query heads of each token together. `rest` is
    attention to all else (a text's opening, their own tokens, sink logits), `block` to the entries,
    None if it is still to be computed. `real` is False at padding.
    """

    queries: Tensor  # [B, H, n, D]
    rest: PartOutput  # [B, H, n, Dv] and [B, H, n]
    real: Tensor  # [B, n]
    groups: int  # G
    block: PartOutput | None = None

    @classmethod
    def joined(cls, parts: Sequence[References]) -> References:
        """References of several forwards as one."""
        if len(parts) == 1:
            return parts[0]
        blocks = [each.block for each in parts if each.block is not None]
        return cls(
            torch.cat([each.queries for each in parts], 2),
            _joined([each.rest for each in parts]),
            torch.cat([each.real for each in parts], 1),
            parts[0].groups,
            _joined(blocks) if len(blocks) == len(parts) else None,
        )

    def rows(self) -> Iterator[RowReferences]:
        """References of each row, without padding, the ones that judge the fit last."""
        for row, real in enumerate(self.real):
            index = real.nonzero()[:, 0]
            token = torch.arange(len(index), device=index.device) // self.groups
            judges = token % HELD == HELD - 1
            order = torch.cat([index[~judges], index[judges]])
            yield RowReferences(
                self.queries[row][:, order],
                self.rest.at(row).at(slice(None), order),
                None if self.block is None else self.block.at(row).at(slice(None), order),
                int(judges.sum()),
            )


def _joined(parts: Sequence[PartOutput]) -> PartOutput:
    outs, masses = zip(*parts, strict=True)
    return PartOutput(torch.cat(outs, 2), torch.cat(masses, 2))


class RowReferences(NamedTuple):
    """References of one row; the last `judges` ones judge the fit."""

    queries: Tensor  # [H, n, D]
    rest: PartOutput  # [H, n, Dv] and [H, n]
    block: PartOutput | None
    judges: int

    def judging(self) -> RowReferences:
        """References that judge a fit, without the others."""
        last = slice(None), slice(self.queries.shape[1] - self.judges, None)
        block = None if self.block is None else self.block.at(*last)
        return RowReferences(self.queries[last], self.rest.at(*last), block, self.judges)


class _Part(NamedTuple):
    """Queries `[Hq, n, D]` of a row, their columns `[n]` and positions `[n]`, −1 for padding."""

    query: Tensor
    columns: Tensor
    positions: Tensor

    def every(self, stride: int) -> _Part:
        """Copies of the tokens' queries at positions that are multiples of `stride`."""
        return self.at((self.positions >= 0) & (self.positions % stride == 0))

    def at(self, chosen: Tensor) -> _Part:
        """Copies of the queries at the indices, or of the mask, `chosen`."""
        return _Part(self.query[:, chosen], self.columns[chosen], self.positions[chosen])


@dataclass
class _Row:
    """One row's queries: those of every `stride`-th position, as if it were alone."""

    parts: list[_Part] = field(default_factory=list)
    stride: int = 1

    def add(self, part: _Part, most: int) -> None:
        """Adds queries; at most `2·most` are kept."""
        # A view would keep the queries of the whole piece alive.
        self.parts.append(part.every(self.stride))
        while sum(len(columns) for _, columns, _ in self.parts) > 2 * most:
            self.stride *= 2
            self.parts = [part.every(self.stride) for part in self.parts]

    def joined(self, most: int) -> _Part:
        """At most `most` queries, evenly chosen."""
        query, columns, positions = zip(*self.parts, strict=True)
        part = _Part(torch.cat(query, 1), torch.cat(columns), torch.cat(positions))
        held = len(part.columns)
        return part if held <= most else part.at(evenly(held, most, part.columns.device))


class ReferenceQueries(Observer[None]):
    """Queries of a prefill's tokens, evenly thinned, or references made of a text's repetition.

    `first` is the prefill's first column.
    """

    def __init__(self, need: ReferencesNeed) -> None:
        super().__init__()
        self.need = need
        self.forget()

    def fresh(self) -> ReferenceQueries:
        return ReferenceQueries(self.need)

    def forget(self) -> None:
        """Drops all queries, when a prefill's entries have been fitted."""
        self._rows: list[_Row] = []
        self.repeated: list[References] = []
        self.first = 0

    def read_piece(self, layer: Layer, call: AttentionCall) -> None:
        if repeats_references(layer.needs):
            return
        query, new = call.query, call.query.shape[2]
        columns = torch.arange(layer.seen - new, layer.seen, device=query.device)
        real = layer.sequence.real(columns.expand(len(query), 1, -1))[:, 0]
        most = most_tokens(self.need, query.shape[1], call.key)
        self.add(query, columns, layer.sequence.positions(real), most)

    @property
    def query_heads(self) -> int:
        """Query heads of the prefill's queries; 0 if none are kept."""
        return self._rows[0].parts[0].query.shape[0] if self._rows else 0

    def add(self, query: Tensor, columns: Tensor, positions: Tensor, most: int) -> None:
        """Adds queries `[B, Hq, S, D]`; at most `2·most` of each row are kept.

        They are of the consecutive `columns [S]`, and of `positions [B, S]`, −1 for padding.
        """
        if not self._rows:
            self.first, self._rows = int(columns[0]), [_Row() for _ in query]
        for row, own, at in zip(self._rows, query, positions, strict=True):
            row.add(_Part(own, columns, at), most)

    def joined(self, most: int) -> tuple[Tensor, Tensor]:
        """At most `most` queries `[B, Hq, n, D]` of each row, evenly chosen.

        With their columns `[B, n]`, −1 first where a row has fewer.
        """
        parts = [row.joined(most) for row in self._rows]
        query = left_padded([part.query.transpose(0, 1) for part in parts], 0).transpose(1, 2)
        return query, left_padded([part.columns for part in parts], -1)

    def crop(self, seen: int) -> None:
        for row in self._rows:
            row.parts = [part.at(part.columns < seen) for part in row.parts]

    def index(self, rows: Rows) -> None:
        if self._rows:
            device = self._rows[0].parts[0].query.device
            order = rows(torch.arange(len(self._rows), device=device)).tolist()
            self._rows = [copy.deepcopy(self._rows[i]) for i in order]

    def nbytes(self) -> int:
        tensors = [tensor for row in self._rows for part in row.parts for tensor in part]
        for each in self.repeated:
            tensors += [each.queries, *each.rest, each.real, *(each.block or ())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class ReferencesNeed(Need[None]):
    """Queries that kept entries are fitted to: of a prefill's tokens, or of their repetition."""

    while_reading: ClassVar[bool] = True
    beyond_attention: ClassVar[bool] = False
    words: ClassVar[str] = "reference queries"
    keyword: ClassVar[str] = "references"

    queries: int  # most queries of a KV head
    repeated: bool  # those of the reconstruction where the method has one
    on_policy: bool = False  # as the layers below make them once they are refitted
    by_share: bool = True  # each counts by the attention that the entries receive of it

    def observer(self, fitted: object = None) -> ReferenceQueries:
        return ReferenceQueries(self)

    def joined(self, other: ReferencesNeed) -> ReferencesNeed:
        return self

    def rotates_back(self, needs: Needs) -> bool:
        return not repeats_references(needs)

    def describe(self) -> str:
        if self.on_policy:
            return "queries of the repetition over the refitted layers"
        return f"queries of {'the repetition, if there is one' if self.repeated else 'the text'}"


def repeats_references(needs: Needs) -> bool:
    """True if reference queries are those of the reconstruction, not the prefill's own."""
    how, need = needs.get(ContextReconstruction), needs.get(ReferencesNeed)
    repeats = how is not None and how.head_scores is None
    return repeats and need is not None and need.repeated


def most_tokens(need: ReferencesNeed, query_heads: int, keys: Tensor) -> int:
    """Most tokens whose queries are kept, of all query heads of a KV head."""
    return max(1, need.queries * keys.shape[1] // query_heads)


def evenly(count: int, most: int, device: torch.device) -> Tensor:
    """At most `most` of `count` indices."""
    few = min(count, most)
    return torch.arange(few, device=device) * count // max(few, 1)


def left_padded(rows: list[Tensor], value: int) -> Tensor:
    """Rows `[n, …]` as one tensor `[B, n, …]`, filled up at the front."""
    return pad_sequence(rows, batch_first=True, padding_value=value, padding_side="left")
