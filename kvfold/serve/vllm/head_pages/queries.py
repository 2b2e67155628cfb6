# SPDX-License-Identifier: Apache-2.0
"""Queries of requests' last tokens, kept as they pass through vLLM's attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class QueryRing:
    """Queries of all watched requests, of each layer in one tensor `[n, Hq, D]`."""

    def __init__(self, layers: int) -> None:
        self._of_layers: list[Tensor | None] = [None] * layers
        self._tails: list[QueryTail] = []  # by their first row

    def take(self, count: int) -> QueryTail:
        """Rows for the last `count` tokens of a request."""
        first = at = 0
        while at < len(self._tails) and self._tails[at].first - first < count:
            first = self._tails[at].first + self._tails[at].count
            at += 1
        taken = QueryTail(self, first, count)
        self._tails.insert(at, taken)
        return taken

    def give_back(self, tail: QueryTail) -> None:
        """Lets another request have the rows of a tail."""
        self._tails.remove(tail)

    def write(self, layer: int, rows: Tensor, queries: Tensor) -> None:
        """Keeps `queries [m, Hq, D]` in `rows`, int64 `[m]`."""
        kept, last = self._of_layers[layer], self._tails[-1]
        there = 0 if kept is None else len(kept)
        if there < last.first + last.count:
            grown = queries.new_empty(max(last.first + last.count, 2 * there), *queries.shape[1:])
            if kept is not None:
                grown[:there] = kept
            self._of_layers[layer] = kept = grown
        assert kept is not None
        kept.index_copy_(0, rows, queries)

    def read(self, rows: Tensor) -> list[Tensor]:
        """Queries `[Hq, m, D]` of each layer, in `rows`, int64 `[m]`."""
        return [of[rows.to(of.device)].transpose(0, 1) for of in self._of_layers if of is not None]


@dataclass(frozen=True, eq=False)
class QueryTail:
    """Rows of a ring for the last `count` tokens that a request has read, in turn."""

    ring: QueryRing
    first: int
    count: int

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows of tokens `start` to `stop`, at most `count`, int64."""
        return self.first + torch.arange(start, stop) % self.count

    def stacked(self, seen: int) -> list[Tensor]:
        """Queries `[Hq, W, D]` of each layer, of the last tokens of `seen`, W at most `count`."""
        return self.ring.read(self.rows(max(0, seen - self.count), seen))


@dataclass(frozen=True)
class WatchedStep:
    """Which of a step's tokens are kept, int64 `[m]`, and in which rows of the ring."""

    ring: QueryRing
    tokens: Tensor
    rows: Tensor

    @classmethod
    def of(
        cls,
        blocks: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        device: torch.device,
    ) -> WatchedStep | None:
        """Of requests that write into `blocks`, by `WATCHED`; None: of no request.

        Request r reads tokens `starts[r]` to `starts[r + 1]` of the step, and then has read
        `lengths[r]`.
        """
        watched = [(row, WATCHED[block]) for row, block in enumerate(blocks) if block in WATCHED]
        tokens, rows = [], []
        for row, tail in watched:
            last = min(tail.count, starts[row + 1] - starts[row])
            tokens.append(torch.arange(starts[row + 1] - last, starts[row + 1]))
            rows.append(tail.rows(lengths[row] - last, lengths[row]))
        if not watched:
            return None
        at = (torch.cat(part).to(device) for part in (tokens, rows))
        return cls(watched[0][1].ring, *at)

    def read(self, layer: int, queries: Tensor) -> None:
        """Keeps what is wanted of a layer's `queries [T, Hq, D]`."""
        self.ring.write(layer, self.rows, queries[self.tokens])


# Of the running step, by the block that their request writes into, as `RUNNING` of `layout.py`.
WATCHED: dict[int, QueryTail] = {}
