# SPDX-License-Identifier: Apache-2.0
"""How a layer holds its size while tokens come one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kvfold.cache.prefill import Compression
from kvfold.cache.query_window import Attended, Foreseen
from kvfold.kernels.gather import joined
from kvfold.kernels.single_query import mean_of_heads
from kvfold.methods.observation import Observation
from kvfold.methods.stages.merge.base import Change, Leaving
from kvfold.methods.stages.select.choose import leaving, leaving_between, scores_of
from kvfold.store.dense import DenseStore
from kvfold.store.entry_norms import norms_of

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
        stages = self.plan.stages
        if stages.compensate_one is None or stages.positions == "reindex" or self.plan.shared:
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

    def _chosen(self, seen: Observation) -> Tensor:
        """The slot `[B, H, 1]` that leaves, where more is forced than the ends."""
        assert self.capacity is not None
        places, protected = self.places(), None
        if self.turn.prefix is not None:
            protected = places < self.turn.prefix.view(-1, 1, 1)
        return leaving(self.plan.stages, seen, places, protected, self.capacity)

    def _let_go(self, slot: Tensor) -> None:
        """The entries at `slot [B, H, 1]` leave, and what stays is not moved."""
        self._dense().drop(slot)
        self.surplus = 0
        self.note_eviction()

    def expected(self, attended: Attended) -> int | None:
        """The slot that leaves most often: what has just ceased to be recent has received least.

        None where nobody wants its products with the keys that are attended to, or not such ones:
        entries are compared in float32.
        """
        keys, wanted = self.stored().keys, self.plan.stages.needs.norms == "keys"
        if not wanted or attended.softcap is not None or keys.dtype != torch.float32:
            return None
        ends, stored = self.forced_ends(), keys.shape[2]
        if ends is None or sum(ends) >= stored or attended.key.shape != keys.shape:
            return None
        return stored - ends[1] - 1

    def _entry_kind(self) -> tuple[object, ...]:
        """What single entries of two layers must have in common to be one tensor."""
        keys, values = self.stored().keys, self.stored().values
        return keys.shape[:2], keys.shape[3], values.shape[3], keys.dtype, keys.device

    def _hidden(self, heads: int) -> Tensor | None:
        """What hides holes `[B, heads, T]`; None where there are none."""
        hidden = self._dense().hidden
        return None if hidden is None else hidden[:, :heads]

    def _change(self, change: Change) -> None:
        self._dense().change(change.slot, change.keys, change.values, change.norms)
        self.merging = change.state

    def _dense(self) -> DenseStore:
        """Where entries lie that leave one by one."""
        store = self.stored()
        assert isinstance(store, DenseStore)
        return store

    def _tidy(self) -> None:
        """Leaves out what has left, where it has become much."""
        store = self.stored()
        if isinstance(store, DenseStore) and store.crowded:
            self.copy_alive()

    def _one_seen(self, attended: Attended) -> Observation:
        """What the single query that was watched shows of the layer."""
        store = self._dense()
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
    attended = next(iter(waiting.values()))
    kept = (attended.row, None if attended.foreseen is None else attended.foreseen.products)
    each = sum(t.untyped_storage().nbytes() for t in kept if t is not None)
    return len(waiting) * each > WAITING_BYTES


def hold(watched: dict[Holding, Attended]) -> None:
    """One entry of each head leaves each of these layers, whose attention was watched.

    Layers are treated together where they can be: so small are the numbers that many take hardly
    longer than one.
    """
    slots = _slots(watched)
    for layer, slot in slots.items():
        layer._let_go(slot)
    compensate = next(iter(slots)).plan.stages.compensate_one
    if compensate is not None:
        for layers in _alike(slots, Holding._entry_kind):
            changes = compensate(_leaving(layers, slots, watched))
            for layer, change in zip(layers, changes, strict=True):
                layer._change(change)
    for layer in slots:
        layer._tidy()


def _leaving(
    layers: list[Holding], slots: dict[Holding, Tensor], watched: dict[Holding, Attended]
) -> list[Leaving]:
    """What a compensation gets to see of layers whose single entries have one shape."""
    stores = [layer._dense() for layer in layers]
    of = layers[0].plan.stages.needs.norms
    norms: Sequence[Tensor | None] = [None] * len(layers)
    if of is not None:
        newest = norms_of(joined([store.entries(of)[:, :, -1:] for store in stores]))
        each = zip(stores, newest.chunk(len(stores)), strict=True)
        norms = [store.norms(of, norm) for store, norm in each]
    chosen = [slots[layer] for layer in layers]
    products = _foreseen([watched[layer].foreseen for layer in layers], chosen)
    by_layer = zip(layers, stores, chosen, norms, products, strict=True)
    leaving = []
    for layer, store, slot, norm, product in by_layer:
        hidden = store.hidden
        assert hidden is not None
        entries = store.keys, store.values
        leaving.append(Leaving(*entries, hidden, slot, layer.merging, norm, product))
    return leaving


def _foreseen(foreseen: list[Foreseen | None], slots: list[Tensor]) -> list[Tensor | None]:
    """Products with what left, of the layers where every head's was foreseen."""
    if not any(foreseen):
        return [None] * len(slots)
    chosen = joined(slots).view(len(slots), -1).tolist()
    return [
        each.products if each is not None and set(of_layer) == {each.slot} else None
        for each, of_layer in zip(foreseen, chosen, strict=True)
    ]


def _slots(watched: dict[Holding, Attended]) -> dict[Holding, Tensor]:
    """Which entries leave, `[B, H, 1]`."""
    slots: dict[Holding, Tensor] = {}

    def kind(layer: Holding) -> tuple[object, ...]:
        row, store, heads = watched[layer].row, layer._dense(), watched[layer].key.shape[1]
        assert row is not None
        return layer.forced_ends(), row.shape, row.device, heads, store.keys.shape[1], store.holes

    for layers in _alike(watched, kind):
        ends, heads = layers[0].forced_ends(), layers[0].stored().keys.shape[1]
        if ends is None:
            slots |= {layer: layer._chosen(layer._watched(watched[layer])) for layer in layers}
            continue
        scores = _scores(layers, [watched[layer] for layer in layers])
        # Where all heads go by the same scores, the same is gone from all of them.
        differing = heads if scores.stride(1) else 1
        masks = [mask for layer in layers if (mask := layer._hidden(differing)) is not None]
        hidden = joined(masks) if masks else None
        stages = layers[0].plan.stages
        chosen = leaving_between(stages, scores[:, :differing], hidden, *ends)
        chosen = chosen.expand(-1, heads, -1)
        slots |= zip(layers, chosen.chunk(len(layers)), strict=True)
    return slots


def _scores(layers: list[Holding], watched: list[Attended]) -> Tensor:
    """Finite scores of the entries of layers of one shape `[L·B, H, T]`."""
    stages, stored = layers[0].plan.stages, layers[0].stored().keys
    needs, heads = stages.needs, stored.shape[1]
    alone = not needs.only_attention or needs.column_squares
    if alone or watched[0].key.shape[1] != heads:
        seen = [layer._watched(a) for layer, a in zip(layers, watched, strict=True)]
        scores = joined([scores_of(stages, of_layer, heads) for of_layer in seen])
        return scores.clamp(min=torch.finfo(scores.dtype).min)
    rows = joined([a.row for a in watched if a.row is not None])
    for layer in layers:
        layer.turns += 1
    sums = None
    if needs.column_sums:
        sums = mean_of_heads(rows, heads)
        for layer, of_layer in zip(layers, sums.chunk(len(layers)), strict=True):
            layer._add_moments(of_layer, None)  # in the memory of what is new
    entries, positions = _nothing((len(rows), heads, 0, stored.shape[3]), rows.dtype, rows.device)
    together = Observation(entries, entries, positions, attention=rows, column_sums=sums)
    return scores_of(stages, together, heads)


@lru_cache(maxsize=8)
def _nothing(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Entries of that shape, which are none, and their positions."""
    nothing = torch.empty(shape, dtype=dtype, device=device)
    return nothing, nothing[..., 0]


def _alike(
    layers: Iterable[Holding], kind: Callable[[Holding], tuple[object, ...]]
) -> Iterable[list[Holding]]:
    """Those of one kind each."""
    groups: dict[tuple[object, ...], list[Holding]] = {}
    for layer in layers:
        groups.setdefault(kind(layer), []).append(layer)
    return groups.values()
