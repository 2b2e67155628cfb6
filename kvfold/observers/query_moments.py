# SPDX-License-Identifier: Apache-2.0
"""Moments of queries before RoPE, added up piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvfold.errors import IllegalComposition
from kvfold.kernels.mean_rotation import Rotate, rotary_pairs
from kvfold.kernels.query_moments import QueryMoments, no_moments, query_moments
from kvfold.kernels.views import Named
from kvfold.observers.base import Layer, Need, Needs, Observer, Rows
from kvfold.observers.call import AttentionCall
from kvfold.observers.fitted import FileOfNumbers

BLOCK = 1024  # tokens whose queries are rotated back at once: more would take memory only
# Moments in a file, by their fields, and the number of queries.
SAVED = {"mean": "query_means", "covariance": "query_covariances", "moduli": "query_moduli"}
COUNT = "query_count"


class RunningMoments(Observer[QueryMoments]):
    """Moments of the queries of one prefill; kept after its end where later evictions need them.

    Those of the answer after it may be added.
    """

    saved: ClassVar[tuple[str, ...]] = tuple(SAVED.values())

    def __init__(self, need: QueryMomentsNeed) -> None:
        super().__init__()
        self.need = need
        self.moments: QueryMoments | None = None
        self._ended = False

    def fresh(self) -> RunningMoments:
        return RunningMoments(self.need)

    def read_piece(self, layer: Layer, call: AttentionCall) -> None:
        layer.stay()
        query = call.query
        columns = torch.arange(layer.seen - query.shape[2], layer.seen, device=query.device)
        padded = layer.sequence.valid is not None
        if not padded:  # the first tokens are the first columns
            skipped = max(0, self.need.skip - (layer.seen - query.shape[2]))
            query, columns = query[:, :, skipped:], columns[skipped:]
        columns = layer.sequence.real(columns.expand(len(query), 1, -1))
        positions = layer.sequence.positions(columns)[:, 0]
        self.add(query, positions, padded, layer.plan.rotation)

    def add(self, queries: Tensor, positions: Tensor, padded: bool, rotate: Rotate) -> None:
        """Adds `queries [B, Hq, S, D]` at `positions [B, S]`, −1 for padding, if rows are `padded`.

        Rows without padding have the same positions.
        """
        if self._ended:
            self.moments, self._ended = None, False
        self._count(queries, positions, padded, rotate)

    def add_answer(self, layer: Layer, queries: Tensor, columns: Tensor, first: int) -> None:
        """Adds the queries `[B, Hq, S, D]` of generated tokens since column `first`, if needed.

        `columns [B, S]` are theirs and those of older ones, −1 for padding.
        """
        if not self.need.running:
            return
        layer.stay()
        columns = layer.sequence.real(columns.masked_fill(columns < first, -1)[:, None])
        positions = layer.sequence.positions(columns)[:, 0]
        self._count(queries, positions, True, layer.plan.rotation)

    def _count(self, queries: Tensor, positions: Tensor, padded: bool, rotate: Rotate) -> None:
        need = self.need
        pairs = rotary_pairs(rotate, queries.shape[-1], queries.device) if need.moduli else None
        for block, at in zip(queries.split(BLOCK, 2), positions.split(BLOCK, 1), strict=True):
            before = rotate(block.float(), -at.clamp(min=0))
            counted = at >= need.skip if padded else None
            more = query_moments(before, counted, need.covariance, pairs)
            self.moments = more if self.moments is None else self.moments.joined(more)

    def end_prefill(self, layer: Layer) -> None:
        self.moments, self._ended = self.moments if layer.evicts_later else None, True

    def of(self, layer: Layer, call: AttentionCall | None) -> QueryMoments | None:
        """The moments so far; of no queries before any."""
        if call is None:
            return self.moments
        return self.moments or no_moments(call.query, self.need.covariance, self.need.moduli)

    def index(self, rows: Rows) -> None:
        self.moments = None if self.moments is None else self.moments.index(rows)

    def nbytes(self) -> int:
        return 0 if self.moments is None else self.moments.nbytes()

    def save(self, heads: int) -> tuple[Named, dict[str, Tensor]]:
        if self.moments is None:
            return {}, {}
        held = {name: getattr(self.moments, field) for field, name in SAVED.items()}
        by_head = {
            name: list(moment[0].unflatten(0, (heads, -1)))
            for name, moment in held.items()
            if moment is not None
        }
        return by_head, {COUNT: self.moments.count}

    def load(self, by_head: Named, whole: dict[str, Tensor]) -> None:
        found = {
            field: torch.stack(by_head.pop(name)).flatten(0, 1)[None]
            for field, name in SAVED.items()
            if name in by_head
        }
        if found:
            self.moments, self._ended = QueryMoments(whole[COUNT].clone(), **found), True


class MomentsOfOtherTexts(Observer[QueryMoments]):
    """Moments of other texts' queries, of one row."""

    def __init__(self, moments: QueryMoments) -> None:
        super().__init__()
        self.moments = moments

    def fresh(self) -> MomentsOfOtherTexts:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> MomentsOfOtherTexts:
        return self

    def of(self, layer: Layer, call: AttentionCall | None) -> QueryMoments | None:
        if call is None:
            return None
        rows, device = len(call.query), call.query.device
        return self.moments.index(lambda x: x.to(device).expand(rows, *x.shape[1:]))


@dataclass(frozen=True)
class QueryMomentsNeed(Need[QueryMoments]):
    """Moments of queries before RoPE: of a prefill's, or `running`."""

    while_reading: ClassVar[bool] = True
    beyond_attention: ClassVar[bool] = False
    words: ClassVar[str] = "moments of queries"
    keyword: ClassVar[str] = "query_moments"
    field: ClassVar[str] = "query_moments"

    skip: int = 0  # first tokens of each row whose queries are left out
    covariance: bool = True  # beside the mean
    moduli: bool = False  # beside the mean: mean length of each rotary pair
    running: bool = False  # those of generated tokens count too, from the next round on
    fitted: FileOfNumbers | None = None  # those of other texts, from a file, instead

    @property
    def file(self) -> FileOfNumbers | None:
        """The file that has them."""
        return self.fitted

    def observer(self, fitted: Any = None) -> RunningMoments | MomentsOfOtherTexts:
        return RunningMoments(self) if fitted is None else MomentsOfOtherTexts(fitted)

    def joined(self, other: QueryMomentsNeed) -> QueryMomentsNeed:
        if self != other:
            raise IllegalComposition(
                "the methods leave different first tokens out of the queries' moments, or read "
                "different moments: use one of them"
            )
        return self

    def rotates_back(self, needs: Needs) -> bool:
        return True

    def describe(self) -> str:
        spread = " and covariance" if self.covariance else ""
        lengths = " and pairs' lengths" if self.moduli else ""
        whose = "other texts' queries'" if self.fitted else "the queries'"
        return f"{whose} mean{spread}{lengths}"

    @classmethod
    def of_ranks(cls, value: QueryMoments, join: Callable[..., Tensor], seen: Any) -> QueryMoments:
        return value.over_heads(join)
