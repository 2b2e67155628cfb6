# SPDX-License-Identifier: Apache-2.0
"""Quantizing, pruning and pairing of a layer's oldest entries, as they become due."""

from __future__ import annotations

from kvfold.cache.state import LayerState
from kvfold.methods.observation import Observation


def encode_due(state: LayerState, decoding: bool, observation: Observation | None = None) -> None:
    """Encodes the layer's entries that are due; both layers of a pair once both have attended.

    `observation` is of the kept entries when a prefill ends or a round comes, None while decoding.
    A row whose newest column is padding has ended, and is left as it is.
    """
    store, waiting = state.ragged_store(), state.waiting
    if not store.pairs:
        tokens = None if decoding else state.sequence.tokens()
        ended = () if tokens is None else (~tokens[:, -1]).tolist()
        if store.encode_due(decoding, observation, ended):
            state.evicted_at = state.seen
    elif waiting.first_of_pair is None:
        waiting.first_of_pair = state
    else:
        first, waiting.first_of_pair = waiting.first_of_pair, None
        if first.ragged_store().encode_with(store, decoding):
            first.evicted_at = state.evicted_at = state.seen
