# SPDX-License-Identifier: Apache-2.0
"""One layer of the cache: stores what the model writes, and is compressed by its method."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.cache.columns import Logical
from kvfold.cache.decode import Holding, hold, too_much
from kvfold.cache.query_window import Attended
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.store.dense import DenseStore
from kvfold.store.ragged import SegmentStore


class CompressedLayer(Holding):
    """What transformers writes to, and what attention asks and tells when it is done."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.plan.ranks.check_heads(key_states.shape[1])
        self.dtype, self.device = key_states.dtype, key_states.device
        self.store = DenseStore(key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores new entries `[B, H, S, D]`; returns what is stored as it came."""
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        else:
            if key_states.shape[2] > 1 and not self.turn.frozen and self.turn.own is None:
                self._leave_out_dead()
            self.store.append(key_states, value_states, first=self.seen)
        new = key_states.shape[2]
        self.logical.seen += new
        self.surplus = None if self.surplus is None else self.surplus + new
        store = self.stored()
        self.settle_sinks()
        return store.keys, store.values

    @property
    def sums_wanted(self) -> bool:
        """Whether this forward's column sums will be used."""
        return self.plan.stages.needs.column_sums and not self.turn.frozen

    def shows_all(self, attended: Attended, mask: Tensor | None) -> bool:
        """Whether a single query plainly attends to all that is stored, wherever it stood."""
        store, single = self.store, attended.query.shape[2] == 1
        if not single or mask is not None or not isinstance(store, DenseStore):
            return False
        plain = attended.softcap is None and attended.sinks is None
        return plain and store.moved and not store.holes

    def counted(self, new: int) -> Tensor | None:
        """Which of the last `new` queries are tokens `[B, S]`; None: all are."""
        return None if self.logical.valid is None else self.logical.valid[:, -new:]

    def finish(self, attended: Attended) -> None:
        """Called when the layer's attention is done: observes, and compresses when it is time."""
        waiting = self.turn.singles
        if attended.row is None:
            self._observe_and_compress(attended)
        else:
            waiting[self] = attended
        if waiting and (self.plan.layer == self.plan.layers - 1 or too_much(waiting)):
            self.turn.singles = {}
            hold(waiting)

    def _observe_and_compress(self, attended: Attended) -> None:
        if attended.maxima is not None:
            self._add_maxima(attended.maxima)
        if self.turn.driving:
            columns = torch.arange(self.seen, device=attended.query.device)
            self.turn.watched = self._observe(attended, columns.repeat(len(attended.query), 1))
            return
        if self.turn.frozen:
            return
        if attended.sums is not None:
            self._add_moments(attended.sums, attended.squares)
        stages = self.plan.stages
        if self.turn.ends(self.seen, attended.query.shape[2]):
            self._end_turn(self._observation(attended))
        elif self.turn.goes_on(self.seen):
            self.last_queries.add(attended, self.logical)
        elif stages.decode == "hold" and stages.score is not None:
            self._hold_all(attended)
        elif self.late:
            self.late = False
            self._size_and_compress(self._observation(attended))
        elif isinstance(self.store, SegmentStore) and stages.encode is not None:
            self.turn.encode(self, decoding=True)

    def adopt(self, columns: Tensor, valid: Tensor) -> None:
        """Takes what was just stored for `columns [B, T]` of a prompt in which `valid [B, N]`."""
        store = self.stored()
        assert isinstance(store, DenseStore)
        self.logical = Logical(valid.shape[1], None if bool(valid.all()) else valid)
        self.turns += 1
        self.settled = self.seen
        if columns.shape[1] < valid.shape[1]:
            store.place(columns[:, None])
            self.evicted_at = self.seen

    def end_turn(self) -> None:
        """Compresses after a `reading()` block, from what was remembered of it.

        Raises KvfoldError where a crop took all of that back.
        """
        attended = self.last_queries.attended
        if attended is None or self.store is None:
            return
        if attended.key.shape[1] != self.store.keys.shape[1]:
            raise UnsupportedModel(
                "this model's cache holds latents, whose keys exist only inside a forward: name "
                "the turn's length, `with cache.reading(until=tokens):`, so that its last forward "
                "can compress"
            )
        if self.last_queries.lost:
            raise KvfoldError(
                "the last queries of this turn, by which its entries are scored, were taken back: "
                "read at least one more token before the `cache.reading()` block ends"
            )
        self._end_turn(self._observe(attended, self.last_queries.columns))
