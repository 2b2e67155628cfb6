# SPDX-License-Identifier: Apache-2.0
"""A layer's `Observation`, for its method's stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvfold.cache.state import LayerState
from kvfold.errors import UnsupportedModel
from kvfold.methods.observation import Observation
from kvfold.observers.base import Need
from kvfold.observers.call import AttentionCall
from kvfold.observers.fitted import EntryScorer
from kvfold.observers.last_queries import window_of
from kvfold.observers.stored import KeysBeforeRope

Values = Mapping[type[Need[Any]], Any]


def observation_of(state: LayerState, call: AttentionCall) -> Observation:
    """Observation of the layer after `call`, with the window queries of its prefill."""
    if call.row is not None and window_of(state.needs) <= 1:
        return observation_at(state, call, None)
    query, columns = state.observers.window.prompt.joined(call, state.sequence)
    return observation_at(state, call._replace(query=query), columns)


def observation_at(
    state: LayerState, call: AttentionCall, query_columns: Tensor | None
) -> Observation:
    """Observation of the layer with the queries of `call`, at columns `query_columns [B, W]`."""
    store, positions, needs = state.stored(), state.positions(), state.needs
    expanded = call.key.shape[1] // store.keys.shape[1]
    keys, values = (call.key, call.value) if expanded > 1 else store.dense()
    return Observation(
        keys,
        values,
        positions if expanded == 1 else positions.repeat_interleave(expanded, 1),
        call.query,
        None if query_columns is None else state.sequence.positions(query_columns),
        call.row,
        _per_head(state.observers.of_entries(state, call), expanded),
        tokens_seen=state.seen_per_row(),
        layer=state.plan.layer,
        layers=state.plan.layers,
        seed=draw(state),
        **call.logits,
        rotate=state.plan.rotation if needs.rotated_back else None,
        bias=None if store.bias is None else store.bias.repeat_interleave(expanded, 1),
        most_queries=window_of(needs),
    )


def _per_head(values: Values, expanded: int) -> Values:
    """The values, those of entries for each KV head that a stored head becomes."""
    if expanded == 1:
        return values
    return {
        kind: value if kind.empty is None else value.repeat_interleave(expanded, 1)
        for kind, value in values.items()
    }


def observation_of_stored(state: LayerState, unrotated: bool | None = None) -> Observation:
    """Observation of the entries that a layer stores, without queries and without a forward.

    Scores of entries alone (norms, fitted scorers) are those that a prefill would give them.
    `unrotated` asks for keys before RoPE; None: as the method does.
    """
    keys, values = state.stored().dense()
    unrotated = KeysBeforeRope in state.needs if unrotated is None else unrotated
    observed: dict[type[Need[Any]], Any] = {}
    if unrotated:
        observed[KeysBeforeRope] = state.key_positions()
    if EntryScorer in state.needs:
        observed[EntryScorer] = state.observers[EntryScorer].of(state, None)
    return Observation(
        keys,
        values,
        state.positions(),
        observed=observed,
        tokens_seen=state.seen_per_row(),
        layer=state.plan.layer,
        layers=state.plan.layers,
        seed=draw(state),
        rotate=state.plan.rotation if unrotated else None,
    )


def check_positions(state: LayerState, new: int, position_ids: Tensor | None) -> None:
    """Raises UnsupportedModel unless the model rotates its `new` tokens to their positions.

    `position_ids [B or 1, S]` are the model's.
    """
    if state.plan.layer > 0 or not state.plan.rotation.turns:  # the same in all layers
        return
    store, sequence = state.stored(), state.sequence
    columns = torch.arange(state.seen - new, state.seen, device=store.keys.device)
    expected = sequence.positions(columns.expand(len(store.keys), -1))
    if position_ids is not None and position_ids.shape[1:] == columns.shape:
        tokens = sequence.tokens()
        differ = position_ids != expected
        if not bool((differ if tokens is None else differ & tokens[:, columns]).any()):
            return
    raise UnsupportedModel(
        "the model does not rotate each token to its number in its row, padding left out, so that "
        "there are no un-rotated keys or queries: leave position_ids out, or where rows are padded "
        "let them count from each row's first token, as kvfold.generate does"
    )


def judged(state: LayerState, observation: Observation) -> Observation:
    """The observation of a forward that has returned, whose logits were not known inside it."""
    expanded = observation.keys.shape[1] // state.stored().keys.shape[1]
    known = {kind: state.observers[kind].of(state, None) for kind in state.phase.logs}
    return replace(observation, observed={**observation.observed, **_per_head(known, expanded)})


def draw(state: LayerState) -> int:
    """Seed of this eviction's random draws."""
    return hash((state.plan.seed, state.plan.layer, state.evictions)) % 2**31
