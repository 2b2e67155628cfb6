# SPDX-License-Identifier: Apache-2.0
"""How a layer holds its size while tokens come one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvfold.compensate.eviction import Leaving
from kvfold.compression import Compression
from kvfold.kernels.single import mean_of_heads
from kvfold.observation import Observation
from kvfold.recall import Attended
from kvfold.select.choose import leaving, leaving_between, scores_of
from kvfold.store.dense import DenseStore

WAITING_BYTES = 2**24  # rows of attention that may wait for the other layers'


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

    def _hold_all(self, attended: Attended) -> None:
        """After a generated token: back to the size of the last turn's end."""
        assert self.plan.budget is not None
        if self.capacity is None and self.turns == 0 and self.plan.budget.kind != "ratio":
            self.capacity = self._share(self._observation(attended))
        if self.capacity is not None:
            self.turns += 1
            self._evict(self._observation(attended), self.capacity)

    def _watched(self, attended: Attended) -> Observation:
        """What the single query that was watched shows of the layer."""
        assert attended.row is not None
        self.turns += 1
        needs = self.plan.stages.needs
        if needs.column_sums:
            sums = mean_of_heads(attended.row, attended.key.shape[1])
            self._add_moments(sums, sums.square() if needs.column_squares else None)
        return self._one_seen(attended)

    def _leaving(self, seen: Observation) -> Tensor:
        """The slot `[B, H, 1]` that leaves, where more is forced than the ends."""
        assert self.capacity is not None
        places, protected = self.places(), None
        if self.turn.prefix is not None:
            protected = places < self.turn.prefix.view(-1, 1, 1)
        return leaving(self.plan.stages, seen, places, protected, self.capacity)

    def _let_go(self, slot: Tensor) -> None:
        """The entries at `slot [B, H or 1, 1]` leave, and what stays is not moved."""
        stages, store = self.plan.stages, self.stored()
        assert isinstance(store, DenseStore)
        slot = slot.expand(-1, store.keys.shape[1], -1)
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
        assert isinstance(store, DenseStore)
        positions = store.origins if self.logical.valid is None else None
        if positions is None or positions.shape[1] != attended.key.shape[1]:
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


def too_much(waiting: dict[Holding, Attended]) -> bool:
    """Whether what waits for the other layers takes more memory than it may."""
    row = next(iter(waiting.values())).row
    return row is not None and len(waiting) * row.nbytes > WAITING_BYTES


def hold(watched: dict[Holding, Attended]) -> None:
    """One entry of each head leaves each of these layers, whose attention was watched.

    Layers of one size choose together: so small are the numbers that it takes hardly longer.
    """
    alike: dict[Any, list[tuple[Holding, Tensor, Tensor | None]]] = {}
    for layer, attended in watched.items():
        seen, ends = layer._watched(attended), layer.forced_ends()
        if ends is None:
            layer._let_go(layer._leaving(seen))
            continue
        store = layer.stored()
        assert isinstance(store, DenseStore)
        scores, hidden = scores_of(layer.plan.stages, seen, store.keys.shape[1]), store.hidden
        if scores.stride(1) == 0:
            # All heads go by the same scores, and the same is gone from all of them.
            scores, hidden = scores[:, :1], None if hidden is None else hidden[:, :1]
        kind = ends, scores.shape, scores.device, hidden is None
        alike.setdefault(kind, []).append((layer, scores, hidden))
    for (ends, (rows, *_), *_), of_one_kind in alike.items():
        scores = _together([scores for _, scores, _ in of_one_kind])
        masks = [hidden for *_, hidden in of_one_kind if hidden is not None]
        slots = leaving_between(scores, _together(masks) if masks else None, *ends)
        for (layer, *_), slot in zip(of_one_kind, slots.split(rows), strict=True):
            layer._let_go(slot)


def _together(layers: list[Tensor]) -> Tensor:
    return layers[0] if len(layers) == 1 else torch.cat(layers)
