# SPDX-License-Identifier: Apache-2.0
"""The observation window: the last queries of a prefill, or of the answer after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.kernels.gather import pick
from kvfold.kernels.views import Named
from kvfold.observers.base import Layer, Need, Needs, Observer, Rows
from kvfold.observers.call import AttentionCall
from kvfold.store.sequence import LogicalSequence

# An answer's queries in a file, and their columns.
QUERIES, COLUMNS = "window_queries", "window_columns"


class QueryWindow:
    """The last `width` queries `[B, Hq, W, D]` of a prefill, and their columns `[B, W]`."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.forget()

    def forget(self) -> None:
        """Empties the window, when a prefill ends."""
        self.attended: AttentionCall | None = None
        self.columns: Tensor | None = None

    def add(self, attended: AttentionCall, sequence: LogicalSequence) -> None:
        """Adds the last queries of a piece."""
        query, self.columns = self.joined(attended, sequence)
        # Of the keys only the number of heads is needed, not the entries.
        self.attended = attended._replace(
            query=query.clone(),
            key=attended.key[:, :, :0].clone(),
            value=attended.value[:, :, :0].clone(),
            row=None,
            sums=None,
            squares=None,
            maxima=None,
        )

    def joined(self, attended: AttentionCall, sequence: LogicalSequence) -> tuple[Tensor, Tensor]:
        """Window queries `[B, Hq, W, D]` and columns `[B, W]` with this piece; −1 for padding."""
        query = attended.query[:, :, max(0, attended.query.shape[2] - self.width) :]
        start = sequence.seen - query.shape[2]
        columns = torch.arange(start, sequence.seen, device=query.device).repeat(len(query), 1)
        if (tokens := sequence.tokens()) is not None:
            columns = columns.masked_fill(~tokens[:, start:], -1)
        if self.attended is None or self.columns is None:
            return query, columns
        query = torch.cat([self.attended.query, query], 2)
        return self._last(query, torch.cat([self.columns, columns], 1))

    def crop(self, seen: int) -> None:
        """Drops the queries of columns from `seen` on; older queries do not come back."""
        if seen == 0:
            self.forget()
        if self.attended is None or self.columns is None:
            return
        columns = self.columns.masked_fill(self.columns >= seen, -1)
        query, self.columns = self._last(self.attended.query, columns)
        self.attended = self.attended._replace(query=query)

    def _last(self, query: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """The last `width` of these; padding (−1) must not push out older tokens."""
        order = (columns >= 0).long().argsort(dim=1, stable=True)
        order = order[:, max(0, order.shape[1] - self.width) :]
        wide = order[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
        return query.gather(2, wide), columns.gather(1, order)

    def narrow(self, width: int) -> None:
        """Keeps the last `width` queries."""
        self.width = width
        if self.attended is not None and self.columns is not None:
            query, self.columns = self._last(self.attended.query, self.columns)
            self.attended = self.attended._replace(query=query)

    @property
    def lost(self) -> bool:
        """True if the window had queries and a crop dropped all of them."""
        return self.columns is not None and self.width > 0 and bool((self.columns < 0).all())

    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a selection along the batch axis."""
        if self.attended is None or self.columns is None:
            return
        a = self.attended
        self.attended = a._replace(query=rows(a.query), key=rows(a.key), value=rows(a.value))
        self.columns = rows(self.columns)

    def nbytes(self) -> int:
        """Bytes of the window's queries and columns."""
        if self.attended is None or self.columns is None:
            return 0
        return sum(t.numel() * t.element_size() for t in (self.attended.query, self.columns))


class AnswerWindow:
    """The last `width` queries while an answer is generated, back into the prompt.

    `parts` are queries `[B, Hq, S, D]` and their columns `[B, S]`, −1 for padding: of the prompt's
    window if that is needed, then of one step each.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.parts: list[tuple[Tensor, Tensor]] = []

    def clear(self) -> None:
        """Empties the window."""
        self.parts = []

    def add(self, query: Tensor, columns: Tensor) -> None:
        """Adds queries `[B, Hq, S, D]` of `columns [B, S]`, and drops older ones than needed."""
        self.parts.append((query.clone(), columns))
        if len(self.parts) > max(1, self.width):
            del self.parts[0]

    def add_step(self, query: Tensor, column: int) -> None:
        """Adds the query `[B, Hq, 1, D]` of a decode step."""
        self.add(query, torch.full((len(query), 1), column, device=query.device))

    def joined(self) -> tuple[Tensor, Tensor]:
        """Queries `[B, Hq, W, D]`, at most `width`, and their columns `[B, W]`."""
        query = torch.cat([query for query, _ in self.parts], 2)
        columns = torch.cat([columns for _, columns in self.parts], 1)
        first = max(0, query.shape[2] - self.width)
        return query[:, :, first:], columns[:, first:]

    def crop(self, seen: int) -> None:
        """Drops the queries of columns from `seen` on; older queries do not come back."""
        masked = [
            (query, columns.masked_fill(columns >= seen, -1)) for query, columns in self.parts
        ]
        self.parts = [(query, columns) for query, columns in masked if bool((columns >= 0).any())]

    def renumber(
        self, columns: Tensor, shifts: Tensor, rotate: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Moves the queries to new `columns [B, N]`, −1 for those that leave.

        `rotate` turns queries `[B, Hq, S, D]` by their `shifts [B, N]`, in positions.
        """
        self.parts = [
            (rotate(query, pick(shifts, own, 0)), pick(columns, own, -1))
            for query, own in self.parts
        ]

    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a selection along the batch axis."""
        self.parts = [(rows(query), rows(columns)) for query, columns in self.parts]

    def nbytes(self) -> int:
        """Bytes of the queries and their columns."""
        return sum(t.numel() * t.element_size() for part in self.parts for t in part)


class WindowQueries(Observer[Tensor]):
    """The windows of one layer: of the prompt that is read, and of the answer after it."""

    saved: ClassVar[tuple[str, ...]] = (QUERIES,)

    def __init__(self, width: int = 0) -> None:
        super().__init__()
        self.prompt, self.answer = QueryWindow(width), AnswerWindow(width)

    def fresh(self) -> WindowQueries:
        new = WindowQueries(self.prompt.width)
        new.answer.width = self.answer.width
        return new

    def narrowed(self, width: int) -> WindowQueries:
        """The prompt's last `width` queries, and an empty window of the answer's."""
        new = WindowQueries(width)
        self.prompt.narrow(width)
        new.prompt = self.prompt
        return new

    def end_prefill(self, layer: Layer) -> None:
        self.prompt.forget()

    def index(self, rows: Rows) -> None:
        self.prompt.index(rows)
        self.answer.index(rows)

    def crop(self, seen: int) -> None:
        self.prompt.crop(seen)
        self.answer.crop(seen)

    def renumber(self, layer: Layer, columns: Tensor, shifts: Tensor) -> None:
        self.answer.renumber(columns, shifts, layer.plan.rotation)

    def nbytes(self) -> int:
        return self.prompt.nbytes() + self.answer.nbytes()

    def save(self, heads: int) -> tuple[Named, dict[str, Tensor]]:
        if not self.answer.parts:
            return {}, {}
        queries, columns = self.answer.joined()
        return {QUERIES: list(queries[0].unflatten(0, (heads, -1)))}, {COLUMNS: columns}

    def load(self, by_head: Named, whole: dict[str, Tensor]) -> None:
        if QUERIES in by_head:
            queries = torch.stack(by_head.pop(QUERIES)).flatten(0, 1)[None]
            self.answer.add(queries, whole[COLUMNS].clone())


@dataclass(frozen=True)
class LastQueries(Need[Tensor]):
    """The last `count` queries, of a prefill or of the answer: `observation.queries`."""

    beyond_attention: ClassVar[bool] = False
    words: ClassVar[str] = "the last queries"
    keyword: ClassVar[str] = "window"

    count: int

    def observer(self, fitted: object = None) -> WindowQueries:
        return WindowQueries(self.count)

    def __bool__(self) -> bool:
        return self.count > 0

    def joined(self, other: LastQueries) -> LastQueries:
        return max(self, other, key=lambda each: each.count)

    def describe(self) -> str:
        return "the last query" if self.count == 1 else f"the last {self.count} queries"


def window_of(needs: Needs) -> int:
    """Number of last queries that stages read."""
    need = needs.get(LastQueries)
    return 0 if need is None else need.count
