# SPDX-License-Identifier: Apache-2.0
"""How a layer holds its size while tokens come one by one."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from kvfold.compensate.eviction import Leaving
from kvfold.compression import Compression
from kvfold.observation import Observation
from kvfold.recall import Attended
from kvfold.select.choose import leaving, leaving_between
from kvfold.store.dense import DenseStore


class Holding(Compression):
    """A layer of which entries leave after generated tokens."""

    def evicts_one(self, new: int) -> bool:
        """Whether one entry of each head leaves after this forward of `new` tokens."""
        stages, turn, valid = self.plan.stages, self.turn, self.logical.valid
        if new > 1 or self.surplus != 1 or stages.decode != "hold":
            return False
        if turn.frozen or turn.driving or turn.ends(self.seen, new) or turn.goes_on(self.seen):
            return False
        if stages.compensate is not None and not self._compensates_one():
            return False
        return valid is None or bool(valid[:, -1].all())

    def _compensates_one(self) -> bool:
        """Whether the method can save something of a single entry, in the place of what stays."""
        if self.plan.stages.compensate_one is None or self.sinks is not None or self.plan.shared:
            return False
        return self.capacities()[0] > 0

    def _hold(self, attended: Attended) -> None:
        """After a generated token: back to the size of the last turn's end."""
        assert self.plan.budget is not None
        if self.capacity is None and self.turns == 0 and self.plan.budget.kind != "ratio":
            self.capacity = self._share(self._observation(attended))
        if self.capacity is not None:
            self.turns += 1
            if attended.row is not None:
                self._drop_one(attended)
            else:
                self._evict(self._observation(attended), self.capacity)

    def _drop_one(self, attended: Attended) -> None:
        """One entry of each head leaves, and what stays is not moved."""
        stages, store = self.plan.stages, self.stored()
        assert isinstance(store, DenseStore) and self.capacity is not None
        seen, ends = self._one_seen(attended), self.forced_ends()
        if ends is not None:
            slot = leaving_between(stages, seen, store.hidden, *ends, store.keys.shape[1])
        else:
            places = self.places()
            protected = None
            if self.turn.prefix is not None:
                protected = places < self.turn.prefix.view(-1, 1, 1)
            slot = leaving(stages, seen, places, protected, self.capacity)
        store.drop(slot)
        if stages.compensate_one is not None:
            hidden = store.hidden
            assert hidden is not None
            change = stages.compensate_one(
                Leaving(store.keys, store.values, hidden, slot, self.merging)
            )
            store.change(change.slot, change.keys, change.values)
            self.merging = change.state
        self.surplus, self.evicted_at = 0, self.seen
        if store.crowded:
            self._leave_out_dead()

    def _one_seen(self, attended: Attended) -> Observation:
        """What the single query that was watched shows of the layer."""
        store = self.stored()
        positions = store.view() if self.logical.valid is None else None
        if not isinstance(positions, Tensor) or positions.shape[1] != attended.key.shape[1]:
            return dataclasses.replace(self._observation(attended), budget=self.capacity)
        return Observation(
            attended.key,
            attended.value,
            positions,
            attended.query,
            attention=attended.row,
            column_sums=self.sums,
            column_squares=self.squares,
            seen=self.seen_per_row(),
            budget=self.capacity,
            layer=self.plan.layer,
            layers=self.plan.layers,
            scale=attended.scale,
            softcap=attended.softcap,
            sinks=attended.sinks,
            seed=self._draw(),
        )

    def forced_ends(self) -> tuple[int, int] | None:
        """How many of the first and of the last slots stay; None where that differs by row."""
        if self.logical.valid is not None or self.turn.prefix is not None:
            return None
        least, most = self.capacities()
        return self.plan.stages.forced.ends(least) if least == most else None
