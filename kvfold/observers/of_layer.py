# SPDX-License-Identifier: Apache-2.0
"""All observers of one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from torch import Tensor

from kvfold.kernels.views import Named
from kvfold.observers.base import Layer, Need, Needs, Observer, Rows
from kvfold.observers.call import AttentionCall
from kvfold.observers.column_sums import RunningSums
from kvfold.observers.last_queries import LastQueries, WindowQueries
from kvfold.observers.query_moments import QueryMomentsNeed
from kvfold.observers.stored import KeptScores, KeyMoves, PreviousScores

Kind = type[Need[Any]]


def names_beside() -> set[str]:
    """Names in files of all that any observer holds of a KV head, beside the entries."""
    names, kinds = set[str](), list[type[Observer[Any]]]([Observer])
    while kinds:
        kind = kinds.pop()
        names |= {*kind.empties, *kind.saved}
        kinds += kind.__subclasses__()
    return names


class Observers:
    """The observers of one layer, by the kinds of their needs.

    `window` queries, `kept` scores and key `moves` are held for every method; `of_forwards` are
    those that note each forward, `only_sums` is True if these are sums of attention alone.
    """

    def __init__(
        self,
        by_kind: dict[Kind, Observer[Any]],
        window: WindowQueries,
        kept: KeptScores,
        moves: KeyMoves,
    ) -> None:
        self.by_kind, self.window, self.kept, self.moves = by_kind, window, kept, moves
        self._all = list(dict.fromkeys([*by_kind.values(), window, kept, moves]))
        self.of_forwards = [each for each in self._all if type(each).read is not Observer.read]
        self.only_sums = all(isinstance(each, RunningSums) for each in self.of_forwards)
        self._of_pieces = [
            each for each in self._all if type(each).read_piece is not Observer.read_piece
        ]

    @classmethod
    def of(cls, needs: Needs, fitted: Mapping[Kind, Any], every: int | None = None) -> Observers:
        """New observers; `fitted` is what files have, `every` the tokens of a round, if any."""
        by_kind = {kind: need.observer(fitted.get(kind)) for kind, need in needs.by_kind.items()}
        window = cast(WindowQueries, by_kind.get(LastQueries)) or WindowQueries()
        kept = cast(KeptScores, by_kind.get(PreviousScores)) or KeptScores()
        moments = needs.get(QueryMomentsNeed)
        if moments is not None and moments.running:
            window.answer.width = max(window.answer.width, every or 0)
        return cls(by_kind, window, kept, KeyMoves())

    def fresh(self) -> Observers:
        """New observers for the same needs."""
        by_kind = {kind: each.fresh() for kind, each in self.by_kind.items()}
        window = cast(WindowQueries, by_kind.get(LastQueries)) or self.window.fresh()
        kept = cast(KeptScores, by_kind.get(PreviousScores)) or KeptScores()
        return Observers(by_kind, window, kept, KeyMoves())

    def adopted(
        self, needs: Needs, fitted: Mapping[Kind, Any], every: int | None = None
    ) -> Observers:
        """Observers for other `needs`, with what these have observed of a text."""
        other = Observers.of(needs, fitted, every)
        own = {k: each for k, each in self.by_kind.items() if k in needs and k not in fitted}
        width = other.window.answer.width
        window = self.window.narrowed(other.window.prompt.width)
        window.answer.width = width
        by_kind = {**other.by_kind, **own}
        if LastQueries in by_kind:
            by_kind[LastQueries] = window
        return Observers(by_kind, window, self.kept, self.moves)

    def get(self, kind: Kind) -> Any:
        """The observer of a kind; None if it is not needed."""
        return self.by_kind.get(kind)

    def __getitem__(self, kind: Kind) -> Any:
        return self.by_kind[kind]

    def __iter__(self) -> Iterator[Observer[Any]]:
        return iter(self._all)

    def of_entries(self, layer: Layer, call: AttentionCall | None) -> dict[Kind, Any]:
        """The values of all kinds; those that there are none of are left out."""
        values = {kind: each.of(layer, call) for kind, each in self.by_kind.items()}
        return {kind: value for kind, value in values.items() if value is not None}

    def read(self, layer: Layer, call: AttentionCall) -> None:
        """Notes a forward."""
        for each in self.of_forwards:
            each.read(layer, call)

    def read_piece(self, layer: Layer, call: AttentionCall) -> None:
        """Notes a piece of a prefill."""
        for each in self._of_pieces:
            each.read_piece(layer, call)

    def last_piece(self, layer: Layer) -> None:
        """Notes that a prefill has been read."""
        for each in self._all:
            each.last_piece(layer)

    def end_prefill(self, layer: Layer) -> None:
        """Notes that the values have been taken at a prefill's end."""
        for each in self._all:
            each.end_prefill(layer)

    # --- numbers of entries -------------------------------------------------------------------

    def select(self, slots: Tensor) -> None:
        """Keeps the numbers of the entries at `slots [B, H, K]`, −1 for holes."""
        for each in self._all:
            each.select(slots)

    def per_entry(self, change: Callable[[Tensor], Tensor]) -> None:
        """Applies `change` to all numbers `[B, H, T]`."""
        for each in self._all:
            each.per_entry(change)

    def numbers(self) -> dict[str, tuple[Tensor, float]]:
        """All numbers `[B, H, T]` by name, and what stands for an entry without one."""
        held = (each for each in self._all if each.numbers)
        return {
            name: (numbers, each.empties[name])
            for each in held
            for name, numbers in each.numbers.items()
        }

    def set_numbers(self, name: str, numbers: Tensor | None) -> None:
        """Takes numbers `[B, H, ≤ T]` of the entries; None: there are none."""
        for each in self._all:
            if name in each.empties:
                each.numbers.pop(name, None)
                if numbers is not None:
                    each.numbers[name] = numbers

    # --- changes ------------------------------------------------------------------------------

    def index(self, rows: Rows) -> None:
        """Applies `rows`, a copying selection along the batch axis, to all but the numbers."""
        for each in self._all:
            each.index(rows)

    def crop(self, seen: int) -> None:
        """Forgets the columns from `seen` on, the numbers aside."""
        for each in self._all:
            each.crop(seen)

    def renumber(self, layer: Layer, columns: Tensor, shifts: Tensor) -> None:
        """Follows an edit of the columns."""
        for each in self._all:
            each.renumber(layer, columns, shifts)

    def number_bytes(self) -> int:
        """Bytes of the numbers of entries."""
        return sum(each.numel() * each.element_size() for each, _ in self.numbers().values())

    def nbytes(self) -> int:
        """Bytes of all that is held."""
        return self.number_bytes() + sum(each.nbytes() for each in self._all)

    # --- files --------------------------------------------------------------------------------

    def save(self, heads: int) -> tuple[Named, dict[str, Tensor]]:
        """Tensors of a layer of one row by name, the numbers aside: of each KV head, and whole."""
        by_head: Named = {}
        whole: dict[str, Tensor] = {}
        for each in self._all:
            of_heads, of_layer = each.save(heads)
            by_head |= of_heads
            whole |= of_layer
        return by_head, whole

    def load(self, by_head: Named, whole: dict[str, Tensor]) -> None:
        """Takes what `save` gave out of `by_head`."""
        for each in self._all:
            each.load(by_head, whole)

    @property
    def empties(self) -> dict[str, float]:
        """The numbers that stand for an entry without one, by name."""
        return {name: empty for each in self._all for name, empty in each.empties.items()}
