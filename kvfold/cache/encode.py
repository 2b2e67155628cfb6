# SPDX-License-Identifier: Apache-2.0
"""Quantizing, pruning and pairing of a layer's oldest entries, as they become due."""

from __future__ import annotations

from kvfold.cache.state import LayerState
from kvfold.methods.observation import Observation


def encode_due(state: LayerState, decoding: bool, observation: Observation | None = None) -> None:
    """Encodes the layer's entries that are due; both layers of a pair once both have attended.

    `observation` is of the kept entries when a prefill ends or a round comes, None while decoding.
    A row has ended, and is left as it is, if its newest column is padding; while decoding, if any
    is that came after the last compression, as such padding may be among the entries.
    """
    store, waiting = state.ragged_store(), state.waiting
    padded = state.sequence.valid is not None
    ended = _ended(state, store.new[0] if decoding else 1) if padded else []
    if not store.pairs:
        if store.encode_due(decoding, observation, ended):
            state.evicted_at = state.seen
    elif waiting.first_of_pair is None:
        waiting.first_of_pair = state
    else:
        first, waiting.first_of_pair = waiting.first_of_pair, None
        if first.ragged_store().encode_with(store, decoding, ended):
            first.evicted_at = state.evicted_at = state.seen


def _ended(state: LayerState, newest: int) -> list[bool]:
    """True for each row with padding among its `newest` columns; empty if there is none to know."""
    tokens = state.sequence.tokens()
    if tokens is None or newest == 0:
        return []
    return (~tokens[:, state.seen - newest :]).any(-1).tolist()
