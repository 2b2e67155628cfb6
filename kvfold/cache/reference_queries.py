# SPDX-License-Identifier: Apache-2.0
"""Queries that are kept until a prefill's end, for entries to be fitted to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvfold.methods.stages.refit.base import References


class ReferenceQueries:
    """Queries of a prefill's tokens, evenly thinned, or references made of a text's repetition.

    `parts` are queries `[B, Hq, n, D]` and their columns `[n]`: those of every `stride`-th column.
    `first` is the prefill's first column.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drops all queries, when a prefill's entries have been fitted."""
        self.parts: list[tuple[Tensor, Tensor]] = []
        self.repeated: list[References] = []
        self.stride, self.first = 1, 0

    def add(self, query: Tensor, start: int, most: int) -> None:
        """Adds queries `[B, Hq, S, D]` of columns from `start` on; at most `2·most` are kept."""
        if not self.parts:
            self.first = start
        columns = torch.arange(start, start + query.shape[2], device=query.device)
        self.parts.append((query, columns))
        self._thin()
        while sum(len(columns) for _, columns in self.parts) > 2 * most:
            self.stride *= 2
            self._thin()
        # A view would keep the queries of the whole piece alive.
        self.parts[-1] = (self.parts[-1][0].clone(), self.parts[-1][1])

    def _thin(self) -> None:
        """Keeps the columns that are a multiple of the stride."""
        for i, (query, columns) in enumerate(self.parts):
            chosen = (columns % self.stride == 0).nonzero()[:, 0]
            if len(chosen) < len(columns):
                self.parts[i] = query.index_select(2, chosen), columns[chosen]

    def joined(self, most: int) -> tuple[Tensor, Tensor]:
        """At most `most` queries `[B, Hq, n, D]`, evenly chosen, and their columns `[n]`."""
        query = torch.cat([query for query, _ in self.parts], 2)
        columns = torch.cat([columns for _, columns in self.parts])
        if len(columns) <= most:
            return query, columns
        chosen = torch.arange(most, device=columns.device) * len(columns) // most
        return query.index_select(2, chosen), columns[chosen]

    def crop(self, seen: int) -> None:
        """Drops the queries of columns from `seen` on."""
        kept = [(query, columns[columns < seen]) for query, columns in self.parts]
        self.parts = [(query[:, :, : len(columns)], columns) for query, columns in kept]

    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a selection along the batch axis."""
        self.parts = [(rows(query), columns) for query, columns in self.parts]

    def nbytes(self) -> int:
        """Bytes of the queries, their columns and all that was made of them."""
        tensors = [tensor for part in self.parts for tensor in part]
        for each in self.repeated:
            tensors += [each.queries, *each.rest, each.real, *(each.block or ())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
