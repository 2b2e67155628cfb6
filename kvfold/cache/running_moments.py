# SPDX-License-Identifier: Apache-2.0
"""Moments of queries before RoPE, added up piece by piece."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvfold.kernels.mean_rotation import rotary_pairs
from kvfold.kernels.query_moments import QueryMoments, no_moments, query_moments
from kvfold.methods.observation import QueryMomentsNeed
from kvfold.store.reindexed_sinks import Rotate

BLOCK = 1024  # tokens whose queries are rotated back at once: more would take memory only


class RunningMoments:
    """Moments of the queries of one prefill; kept after its end where later evictions need them.

    Those of the answer after it may be added.
    """

    def __init__(self) -> None:
        self.moments: QueryMoments | None = None
        self._ended = False

    def add(
        self,
        queries: Tensor,
        positions: Tensor,
        padded: bool,
        rotate: Rotate,
        need: QueryMomentsNeed,
    ) -> None:
        """Adds `queries [B, Hq, S, D]` at `positions [B, S]`, −1 for padding, if rows are `padded`.

        Rows without padding have the same positions.
        """
        if self._ended:
            self.moments, self._ended = None, False
        self._count(queries, positions, padded, rotate, need)

    def add_answer(
        self, queries: Tensor, positions: Tensor, rotate: Rotate, need: QueryMomentsNeed
    ) -> None:
        """Adds `queries [B, Hq, S, D]` of generated tokens at `positions [B, S]`, −1 for none."""
        self._count(queries, positions, True, rotate, need)

    def _count(
        self,
        queries: Tensor,
        positions: Tensor,
        padded: bool,
        rotate: Rotate,
        need: QueryMomentsNeed,
    ) -> None:
        pairs = rotary_pairs(rotate, queries.shape[-1], queries.device) if need.moduli else None
        for block, at in zip(queries.split(BLOCK, 2), positions.split(BLOCK, 1), strict=True):
            before = rotate(block.float(), -at.clamp(min=0))
            counted = at >= need.skip if padded else None
            more = query_moments(before, counted, need.covariance, pairs)
            self.moments = more if self.moments is None else self.moments.joined(more)

    def end(self, keep: bool) -> None:
        """Ends the prefill: the next one begins anew."""
        self.moments, self._ended = self.moments if keep else None, True

    def restore(self, moments: QueryMoments) -> None:
        """Takes over the moments of a prefill that has ended."""
        self.moments, self._ended = moments, True

    def of(self, queries: Tensor, need: QueryMomentsNeed) -> QueryMoments:
        """The moments so far; of no queries, shaped like `queries [B, Hq, S, D]`, before any."""
        return self.moments or no_moments(queries, need.covariance, need.moduli)

    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a selection along the batch axis."""
        self.moments = None if self.moments is None else self.moments.index(rows)

    def nbytes(self) -> int:
        """Bytes of the moments."""
        return 0 if self.moments is None else self.moments.nbytes()
