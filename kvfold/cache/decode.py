# SPDX-License-Identifier: Apache-2.0
"""Decode eviction: a layer holds its size while tokens come one by one.

Where one entry of each head leaves per step, nothing is moved: the entry becomes a hole, and layers
are evicted together after the last one's attention (`evict_one`). Otherwise the layer is evicted
as at a prefill's end (`evict_after_token`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from kvfold.cache.evict import evict
from kvfold.cache.observe import Values, draw, observation_of
from kvfold.cache.sizes import size_of
from kvfold.cache.state import LayerState
from kvfold.kernels.gather import joined
from kvfold.kernels.single_query import mean_of_heads
from kvfold.methods.observation import Observation
from kvfold.methods.stages.base import rounds_hold
from kvfold.methods.stages.merge.base import Leaving
from kvfold.methods.stages.select.choose import leaving, leaving_between, scores_of
from kvfold.methods.stages.when import Hold
from kvfold.observers.call import AttentionCall, PredictedEviction
from kvfold.observers.column_sums import ColumnSquares, ColumnSums, RunningSums
from kvfold.store.dense import DenseStore
from kvfold.store.entry_norms import norms_of

Calls = dict[LayerState, AttentionCall]
Stores = dict[LayerState, DenseStore]
Entries = dict[LayerState, tuple[Tensor, Tensor]]  # keys and values
# Forced ends and stored heads; KV heads, holes or none, shape and device of the rows
RowKind = tuple[tuple[int, int] | None, int, int, bool, torch.Size, torch.device]
Kind = TypeVar("Kind", bound=Hashable)


def evicts_one(state: LayerState, new: int) -> bool:
    """True if this forward of `new` tokens is a decode step that evicts one entry of each head."""
    if new > 1 or state.surplus != 1:
        return False
    stages, phase, valid = state.plan.stages, state.phase, state.sequence.valid
    if (
        phase.frozen
        or phase.layerwise
        or not (isinstance(stages.when, Hold) or rounds_hold(stages))
    ):
        return False
    if phase.step(state.sequence.seen, new) != "decode":
        return False
    if stages.merge is not None and not _merges_one(state):
        return False
    forced = stages.forced
    unbounded = (forced.sinks or forced.spans) and state.forced_ends() is None
    if unbounded and forced.least > state.capacities()[0]:
        return False  # all entries of a head may be forced
    return valid is None or bool(valid[:, -1].all())


def predicted_slot(state: LayerState, call: AttentionCall, store: DenseStore) -> int | None:
    """The slot most likely to be evicted: the newest entry outside the recent window, which has had
    the least time to receive attention.

    None where the merge stage does not ask for the products of its key with all keys, or where the
    kernel cannot give them: entries are compared in float32, without a softcap.
    """
    merge = state.plan.stages.merge
    if merge is None or merge.norms != "keys" or call.logits.get("softcap") is not None:
        return None
    ends, stored = state.forced_ends(), call.key.shape[2]
    if ends is None or sum(ends) >= stored or state.plan.caches_latents:
        return None
    return stored - ends[1] - 1 if call.key.dtype == torch.float32 else None


def evict_after_token(state: LayerState, call: AttentionCall) -> None:
    """Evicts down to the layer's capacity after a generated token."""
    assert state.plan.budget is not None
    if state.capacity is None and state.evictions == 0 and state.plan.budget.kind != "ratio":
        state.note_size(size_of(state, observation_of(state, call)))
    if state.capacity is not None:
        state.begin_eviction()
        evict(state, observation_of(state, call), state.capacity)


def evict_one(calls: Calls) -> None:
    """Evicts one entry of each head of each of these layers, by their observed attention rows.

    Layers of one shape are joined: their tensors are so small that many layers take hardly longer
    than one.
    """
    stores: Stores = {}
    evictions = {state: state.evictions + 1 for state in calls}
    for state in calls:
        store = state.store
        assert isinstance(store, DenseStore)
        stores[state] = store
    slots = _leaving_slots(calls, stores)
    stages = next(iter(slots)).plan.stages
    for state, slot in slots.items():
        stores[state].drop(slot)
    merge, merging = stages.merge, {state: state.merging for state in slots}
    if merge is not None and merge.one is not None:
        entries = {state: stores[state].dense() for state in slots}
        for alike in _grouped(slots, partial(_entry_kind, entries)).values():
            changes = merge.one(_merge_inputs(alike, slots, calls, stores, entries))
            for state, change in zip(alike, changes, strict=True):
                stores[state].change(change.slot, change.keys, change.values, change.norms)
                merging[state] = change.state
    for state in slots:
        state.note_one_left(evictions[state], merging[state])
        if stores[state].crowded:
            state.copy_alive()


# --- choice of the evicted entries ----------------------------------------------------------


def _leaving_slots(calls: Calls, stores: Stores) -> dict[LayerState, Tensor]:
    """Slots `[B, H, 1]` of each layer's evicted entries."""
    slots: dict[LayerState, Tensor] = {}
    groups = _grouped(calls, partial(_row_kind, calls, stores))
    for (ends, heads, *_), alike in groups.items():
        if ends is None:
            slots |= {state: _leaving_slot(state, calls[state]) for state in alike}
            continue
        scores = _scores(alike, calls, heads)
        # Scores shared by all heads: their holes are the same, so decide once.
        differing = heads if scores.stride(1) else 1
        masks = [m[:, :differing] for state in alike if (m := stores[state].hidden) is not None]
        hidden = joined(masks) if masks else None
        chosen = leaving_between(alike[0].plan.stages, scores[:, :differing], hidden, *ends)
        chosen = chosen.expand(-1, heads, -1)
        slots |= zip(alike, chosen.chunk(len(alike)), strict=True)
    return slots


def _row_kind(calls: Calls, stores: Stores, state: LayerState) -> RowKind:
    """The properties that layers share when their attention rows can be joined."""
    call, store = calls[state], stores[state]
    row, each = call.row, call.key.shape[1]
    assert row is not None
    heads = store.keys.shape[1] if state.plan.caches_latents else each
    return state.forced_ends(), heads, each, store.holes, row.shape, row.device


def _leaving_slot(state: LayerState, call: AttentionCall) -> Tensor:
    """Slot `[B, H, 1]` of one layer, if entries other than its first and last are forced."""
    assert state.capacity is not None
    observation, positions, protected = _observed_row(state, call), state.positions(), None
    if state.phase.prefix is not None:
        protected = positions < state.phase.prefix.view(-1, 1, 1)
    return leaving(state.plan.stages, observation, positions, protected, state.capacity)


def _scores(alike: list[LayerState], calls: Calls, heads: int) -> Tensor:
    """Finite scores `[L·B, H, T]` of the entries of L layers of one shape."""
    stages, key = alike[0].plan.stages, calls[alike[0]].key
    needs = stages.needs
    squares = ColumnSquares in needs.by_kind
    alone = not needs.only_attention or squares or needs.beyond_attention
    if alone or key.shape[1] != heads or not alike[0].observers.only_sums:
        seen = [_observed_row(state, calls[state]) for state in alike]
        return joined([scores_of(stages, of_layer, heads) for of_layer in seen])
    rows = joined([row for state in alike if (row := calls[state].row) is not None])
    sums = None
    if ColumnSums in needs.by_kind:
        sums = mean_of_heads(rows, heads)
        for state, of_layer in zip(alike, sums.chunk(len(alike)), strict=True):
            running = state.observers.by_kind[ColumnSums]
            assert isinstance(running, RunningSums)
            running.add_stored(of_layer)
    entries, positions = _nothing((len(rows), heads, 0, key.shape[3]), rows.dtype, rows.device)
    observed: Values = {} if sums is None else {ColumnSums: sums}
    together = Observation(entries, entries, positions, attention=rows, observed=observed)
    return scores_of(stages, together, heads)


def _observed_row(state: LayerState, call: AttentionCall) -> Observation:
    """Observation of a layer after a single query with an observed attention row."""
    assert call.row is not None
    state.begin_eviction()
    needs, observers = state.plan.stages.needs, state.observers
    if ColumnSums in needs.by_kind:
        sums = mean_of_heads(call.row, call.key.shape[1])
        squares = sums.square() if ColumnSquares in needs.by_kind else None
        call = call._replace(sums=sums, squares=squares)
    observers.read(state, call)
    store = state.dense_store()
    positions = store.stored_columns if state.sequence.valid is None else None
    if needs.beyond_attention or positions is None or positions.shape[1] != call.key.shape[1]:
        return dataclasses.replace(observation_of(state, call), budget=state.capacity)
    return Observation(
        call.key,
        call.value,
        positions,
        call.query,
        attention=call.row,
        observed=observers.of_entries(state, call),
        tokens_seen=state.seen_per_row(),
        budget=state.capacity,
        layer=state.plan.layer,
        layers=state.plan.layers,
        seed=draw(state),
        **call.logits,
    )


# --- merging of the evicted entry -----------------------------------------------------------


def _merges_one(state: LayerState) -> bool:
    """True if the method can merge a single entry by overwriting a kept one in place."""
    stages = state.plan.stages
    if (
        stages.merge is None
        or stages.merge.one is None
        or stages.positions == "reindex"
        or state.plan.shared
    ):
        return False
    return state.capacities()[0] > 0


def _merge_inputs(
    alike: list[LayerState],
    slots: dict[LayerState, Tensor],
    calls: Calls,
    of_states: Stores,
    entries: Entries,
) -> list[Leaving]:
    """Inputs of the merge stage for layers whose entries have one shape."""
    stores, held = [of_states[state] for state in alike], [entries[state] for state in alike]
    merge = alike[0].plan.stages.merge
    of = None if merge is None else merge.norms
    norms: Sequence[Tensor | None] = [None] * len(alike)
    if of is not None:
        measured = [keys if of == "keys" else values for keys, values in held]
        newest = norms_of(joined([each[:, :, -1:] for each in measured])).chunk(len(alike))
        each = zip(stores, measured, newest, strict=True)
        norms = [store.norms(rows, norm) for store, rows, norm in each]
    chosen = [slots[state] for state in alike]
    products = _products([calls[state].predicted for state in alike], chosen)
    inputs = []
    for i, (state, store) in enumerate(zip(alike, stores, strict=True)):
        hidden = store.hidden
        assert hidden is not None
        beside = state.merging, norms[i], products[i]
        inputs.append(Leaving(*held[i], hidden, chosen[i], *beside))
    return inputs


def _products(
    predicted: list[PredictedEviction | None], slots: list[Tensor]
) -> list[Tensor | None]:
    """Products of all keys with the evicted key, for layers whose slots were all predicted."""
    if not any(predicted):
        return [None] * len(slots)
    chosen = joined(slots).view(len(slots), -1).tolist()
    return [
        each.products if each is not None and set(of_layer) == {each.slot} else None
        for each, of_layer in zip(predicted, chosen, strict=True)
    ]


def _entry_kind(entries: Entries, state: LayerState) -> tuple[object, ...]:
    """Shapes, dtype and device that layers must have in common so that they merge together."""
    keys, values = entries[state]
    return keys.shape[:2], keys.shape[3], values.shape[3], keys.dtype, keys.device


def _grouped(
    states: Iterable[LayerState], kind: Callable[[LayerState], Kind]
) -> dict[Kind, list[LayerState]]:
    """Layers by their kind."""
    groups: dict[Kind, list[LayerState]] = {}
    for state in states:
        groups.setdefault(kind(state), []).append(state)
    return groups


@lru_cache(maxsize=8)
def _nothing(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Empty keys of that shape (T is 0), and their empty positions."""
    nothing = torch.empty(shape, dtype=dtype, device=device)
    return nothing, nothing[..., 0]
