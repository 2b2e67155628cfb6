# SPDX-License-Identifier: Apache-2.0
"""Quantizing, pruning and pairing of a layer's oldest entries, as they become due."""

from __future__ import annotations

from torch import Tensor

from kvfold.cache.state import LayerState
from kvfold.methods.observation import Observation


def encode_due(state: LayerState, decoding: bool, observation: Observation | None = None) -> None:
    """Encodes the layer's entries that are due; both layers of a pair once both have attended.

    `observation` is of the kept entries when a prefill ends or a round comes, None while decoding.
    Rows that have ended stay as they are. When a prefill ends, these are the rows whose newest
    column is padding; while decoding, those with padding in any column since the last compression.
    """
    store = state.ragged_store()
    tokens = state.sequence.tokens()
    ended = [] if tokens is None else rows_ended(tokens, store.new[0] if decoding else 1)
    if not store.pairs:
        if store.encode_due(decoding, observation, ended, state.sequence.positions):
            state.stay()
        return
    for first in state.barrier.paired.arrive(state, 2)[:1]:
        if first.ragged_store().encode_with(store, decoding, ended):
            first.stay()
            state.stay()


def rows_ended(tokens: Tensor, newest: int) -> list[bool]:
    """True for each row of `tokens [B, N]` with padding among its `newest` columns."""
    return (~tokens[:, tokens.shape[1] - newest :]).any(-1).tolist()
