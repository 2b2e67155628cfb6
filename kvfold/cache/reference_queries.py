# SPDX-License-Identifier: Apache-2.0
"""Queries that are kept until a prefill's end, for entries to be fitted to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.methods.stages.refit.base import References


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


class ReferenceQueries:
    """Queries of a prefill's tokens, evenly thinned, or references made of a text's repetition.

    `first` is the prefill's first column.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drops all queries, when a prefill's entries have been fitted."""
        self._rows: list[_Row] = []
        self.repeated: list[References] = []
        self.first = 0

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
        """Drops the queries of columns from `seen` on."""
        for row in self._rows:
            row.parts = [part.at(part.columns < seen) for part in row.parts]

    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a copying selection along the batch axis."""
        if self._rows:
            device = self._rows[0].parts[0].query.device
            order = rows(torch.arange(len(self._rows), device=device)).tolist()
            self._rows = [copy.deepcopy(self._rows[i]) for i in order]

    def nbytes(self) -> int:
        """Bytes of the queries, their columns and positions, and all that was made of them."""
        tensors = [tensor for row in self._rows for part in row.parts for tensor in part]
        for each in self.repeated:
            tensors += [each.queries, *each.rest, each.real, *(each.block or ())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def evenly(count: int, most: int, device: torch.device) -> Tensor:
    """At most `most` of `count` indices."""
    few = min(count, most)
    return torch.arange(few, device=device) * count // max(few, 1)


def left_padded(rows: list[Tensor], value: int) -> Tensor:
    """Rows `[n, …]` as one tensor `[B, n, …]`, filled up at the front."""
    return pad_sequence(rows, batch_first=True, padding_value=value, padding_side="left")
