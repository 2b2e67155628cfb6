# SPDX-License-Identifier: Apache-2.0
"""Sizes of a layer by the budget, before any entry is scored."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.cache.state import LayerState
from kvfold.methods.base import Across
from kvfold.methods.observation import Observation
from kvfold.store.encoding import BIAS_BYTES, EntrySize


def size_of(state: LayerState, observation: Observation) -> Tensor:
    """Entries per KV head, `[B]` or `[B, H]`; uniform if the size depends on other layers."""
    if isinstance(state.plan.stages.allocate, Across):
        return even_size(state)
    free = state.seen_per_row() - state.protected()
    return state.plan.counts(observation, free, _entry_size(state), _heads(state))


def even_size(state: LayerState, unrounded: bool = False) -> Tensor:
    """Budget in entries per KV head and layer `[B]`, without protected ones.

    Int64, or with `unrounded` float64 before rounding down.
    """
    free = state.seen_per_row() - state.protected()
    plan, size, heads = state.plan, _entry_size(state), _heads(state)
    if unrounded:
        exact = [plan.unrounded(n, size, heads, len(free)) for n in free.tolist()]
        return torch.tensor(exact, device=free.device, dtype=torch.float64)
    totals = [plan.total(n, size, heads, len(free)) for n in free.tolist()]
    return torch.tensor(totals, device=free.device) // plan.layers


def _heads(state: LayerState) -> int:
    """Number of the layer's KV heads on all ranks together."""
    return state.stored().keys.shape[1] * state.plan.ranks.size


def _entry_size(state: LayerState) -> EntrySize:
    keys, values, refit = state.stored().keys, state.stored().values, state.plan.stages.refit
    bias = BIAS_BYTES if refit is not None and refit.gives_bias else 0
    return EntrySize(keys.shape[-1], values.shape[-1], keys.element_size(), bias)
