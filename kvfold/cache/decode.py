# SPDX-License-Identifier: Apache-2.0
"""Decode eviction: a layer holds its size while tokens come one by one.

Where one entry of each head leaves per step, nothing is moved: the entry becomes a hole, and layers
are evicted together after the last one's attention (`evict_one`). Otherwise the layer is evicted
as at a prefill's end (`evict_after_token`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.cache.evict import evict
from kvfold.cache.observe import Values, draw, observation_of
from kvfold.cache.sizes import size_of
from kvfold.cache.state import LayerState
from kvfold.kernels.gather import joined, parted
from kvfold.kernels.single_query import mean_of_heads
from kvfold.methods.observation import Observation
from kvfold.methods.stages.base import rounds_hold
from kvfold.methods.stages.merge.base import Leaving, MergeStages
from kvfold.methods.stages.select.choose import (
    check_numbers,
    leaving,
    leaving_between,
    scores_of,
)
from kvfold.methods.stages.when import Hold
from kvfold.observers.call import AttentionCall
from kvfold.observers.column_sums import ColumnSquares, ColumnSums, add_together
from kvfold.store.dense import DenseStore
from kvfold.store.entry_norms import On, norms_of

Calls = dict[LayerState, AttentionCall]
Stores = dict[LayerState, DenseStore]
Entries = dict[LayerState, tuple[Tensor, Tensor]]  # keys and values
# Forced ends and stored heads; KV heads, holes or none, shape and device of the rows
RowKind = tuple[tuple[int, int] | None, int, int, bool, torch.Size, torch.device]


class RowsAlike(NamedTuple):
    """Layers whose attention rows have one shape, these rows, and the masks of their holes."""

    states: list[LayerState]
    rows: list[Tensor]  # [B, Hq, 1, T]
    hidden: list[Tensor]  # [B, H, T], −∞ at holes, 0 elsewhere; none if they have no holes


def evicts_one(state: LayerState, new: int) -> bool:
    """True if this forward of `new` tokens is a decode step that evicts one entry of each head."""
    if new > 1 or state.surplus != 1:
        return False
    stages, phase, sequence = state.plan.stages, state.phase, state.sequence
    in_prefill = phase.reading or sequence.seen <= phase.until  # `until`'s own token ends it
    if in_prefill or phase.frozen or phase.layerwise:
        return False
    if not (isinstance(stages.when, Hold) or rounds_hold(stages)):
        return False
    if stages.merge is not None and not _merges_one(state):
        return False
    forced = stages.forced
    unbounded = (forced.sinks or forced.spans) and state.forced_ends() is None
    if unbounded and forced.least > state.capacities()[0]:
        return False  # all entries of a head may be forced
    return sequence.valid is None or bool(sequence.valid[:, -1].all())


def predicted_slot(state: LayerState, call: AttentionCall, merge: MergeStages) -> int | None:
    """The slot most likely to be evicted: the newest entry outside the recent window, which has had
    the least time to receive attention.

    None where `merge` does not ask for the products of its key with all keys, or where the kernel
    cannot give them: entries are compared in float32, without a softcap.
    """
    if merge.norms != "keys" or call.logits.get("softcap") is not None:
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
    evictions = {}
    for state in calls:
        assert isinstance(state.store, DenseStore)
        stores[state], evictions[state] = state.store, state.evictions + 1
    slots = _leaving_slots(calls, stores)
    hidden, merging = {}, {}
    for state, slot in slots.items():
        hidden[state], merging[state] = stores[state].drop(slot), state.merging
    merge = next(iter(slots)).plan.stages.merge
    if merge is not None and merge.one is not None:
        for entries in _entries_alike(slots, stores):
            inputs = _merge_inputs(entries, slots, hidden, calls, stores, merge.norms)
            for state, change in zip(entries, merge.one(inputs), strict=True):
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
    least: list[Tensor] = []  # their scores, of layers that may lie on several devices
    device = next(iter(calls.values())).query.device
    for (ends, heads, *_), alike in _rows_alike(calls, stores).items():
        states = alike.states
        if ends is None:
            for state in states:
                slots[state], score = _leaving_slot(state, calls[state])
                least.append(score.flatten().to(device))
            continue
        scores = _scores(alike, calls, heads)
        hidden = joined(alike.hidden) if alike.hidden else None
        if scores.stride(1):
            chosen, score = leaving_between(scores, hidden, *ends)
        else:  # scores shared by all heads: their holes are the same, so decide once
            hidden = None if hidden is None else hidden[:, :1]
            chosen, score = leaving_between(scores[:, :1], hidden, *ends)
            chosen = chosen.expand(-1, heads, -1)
        slots |= zip(states, parted(chosen, len(states)), strict=True)
        least.append(score.flatten().to(device))
    check_numbers(next(iter(slots)).plan.stages, torch.cat(least))  # waits for a GPU once
    return slots


def _rows_alike(calls: Calls, stores: Stores) -> dict[RowKind, RowsAlike]:
    """Layers whose attention rows can be joined, by what they have in common."""
    groups: dict[RowKind, RowsAlike] = {}
    for state, call in calls.items():
        store, row, each = stores[state], call.row, call.key.shape[1]
        assert row is not None
        heads = store.keys.shape[1] if state.plan.caches_latents else each
        kind = state.forced_ends(), heads, each, store.holes, row.shape, row.device
        alike = groups.setdefault(kind, RowsAlike([], [], []))
        alike.states.append(state)
        alike.rows.append(row)
        hidden = store.hidden
        if hidden is not None:
            alike.hidden.append(hidden)
    return groups


def _leaving_slot(state: LayerState, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """As `leaving`, of one layer, if entries other than its first and last are forced."""
    assert state.capacity is not None
    observation, positions, protected = _observed_row(state, call), state.positions(), None
    if state.phase.prefix is not None:
        protected = positions < state.phase.prefix.view(-1, 1, 1)
    return leaving(state.plan.stages, observation, positions, protected, state.capacity)


def _scores(alike: RowsAlike, calls: Calls, heads: int) -> Tensor:
    """Finite scores `[L·B, H, T]` of the entries of L layers of one shape."""
    states = alike.states
    stages, key = states[0].plan.stages, calls[states[0]].key
    needs = stages.needs
    squares = ColumnSquares in needs.by_kind
    alone = not needs.only_attention or squares or needs.beyond_attention
    if alone or key.shape[1] != heads or not states[0].observers.only_sums:
        seen = [_observed_row(state, calls[state]) for state in states]
        return joined([scores_of(stages, of_layer, heads) for of_layer in seen])
    rows = joined(alike.rows)
    sums = None
    if ColumnSums in needs.by_kind:
        sums = mean_of_heads(rows, heads)
        add_together([state.observers.by_kind[ColumnSums] for state in states], sums)
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


def _entries_alike(states: Iterable[LayerState], stores: Stores) -> Iterable[Entries]:
    """Entries of layers that merge together: their shapes, dtype and device are the same."""
    groups: dict[object, Entries] = {}
    for state in states:
        keys, values = stores[state].keys, stores[state].values
        kind = keys.shape[:2], keys.shape[3], values.shape[3], keys.dtype, keys.device
        groups.setdefault(kind, {})[state] = keys, values
    return groups.values()


def _merge_inputs(
    entries: Entries,
    slots: dict[LayerState, Tensor],
    hidden: dict[LayerState, Tensor],
    calls: Calls,
    stores: Stores,
    of: On | None,
) -> list[Leaving]:
    """Inputs of the merge stage, with norms `of` keys or of values, for layers of one shape."""
    newest, chosen, predicted = [], [], False
    for state, (keys, values) in entries.items():
        newest.append((keys if of == "keys" else values)[:, :, -1:])
        chosen.append(slots[state])
        predicted |= calls[state].predicted is not None
    norms = None if of is None else parted(norms_of(joined(newest)), len(entries))
    at = torch.cat(chosen).view(len(entries), -1).tolist() if predicted else []
    inputs = []
    for i, (state, (keys, values)) in enumerate(entries.items()):
        norm = products = None
        if norms is not None:
            norm = stores[state].norms(keys if of == "keys" else values, norms[i])
        expected = calls[state].predicted
        if expected is not None and set(at[i]) == {expected.slot}:
            products = expected.products
        beside = hidden[state], slots[state], state.merging, norm, products
        inputs.append(Leaving(keys, values, *beside))
    return inputs


@lru_cache(maxsize=8)
def _nothing(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Empty keys of that shape (T is 0), and their empty positions."""
    nothing = torch.empty(shape, dtype=dtype, device=device)
    return nothing, nothing[..., 0]
