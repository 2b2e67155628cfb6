# SPDX-License-Identifier: Apache-2.0
"""Bytes and entries of a cache, counted from the tensors of its layers' states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfold.cache.state import LayerState
from kvfold.cache.stats import Stats

if TYPE_CHECKING:
    from kvfold.cache.cache import CompressedCache


def stats_of(cache: CompressedCache) -> Stats:
    """The `Stats` of a cache."""
    phase, started = cache.phase, [state for state in cache.states if state.store is not None]
    counted: set[int] = set()
    parts = [state.stored().nbytes(counted) for state in started]
    entries, positions, slack = (
        (sum(each) for each in zip(*parts, strict=True)) if parts else (0, 0, 0)
    )
    beside = sum(state.nbytes_beside() for state in started)
    if phase.prefix is not None:
        beside += phase.prefix.numel() * phase.prefix.element_size()
    if phase.surprise is not None:
        beside += phase.surprise.nbytes
    return Stats(
        method=str(cache.method),
        budget="none" if cache.budget is None else str(cache.budget),
        per_chunk=cache.per_chunk,
        seen=cache.get_seq_length(),
        seen_per_row=started[0].seen_per_row().tolist() if started else [],
        protected=started[0].protected().tolist() if started else [],
        kept=[(state.columns() >= 0).sum(-1).tolist() for state in started],
        kv_bytes=entries,
        position_bytes=positions,
        state_bytes=beside,
        slack_bytes=slack,
        id_bytes=phase.history.nbytes,
        nbytes_full=sum(_full_bytes(state) for state in started),
        other_layers={i: type(layer).__name__ for i, layer in cache.other_layers().items()},
        forced_over_budget=any(state.over_budget for state in started),
        inexact=cache.method.stages().inexact,
        later=max((state.later() for state in started), default=0),
        later_budget=phase.own_size,
        errors=[[] if s.error is None else s.error.mean(0).tolist() for s in started],
        refits=[[] if s.refit is None else s.refit.mean(0).tolist() for s in started],
    )


def _full_bytes(state: LayerState) -> int:
    """Bytes of a full cache: keys and values of all tokens seen."""
    keys, values = state.stored().keys, state.stored().values
    entry = (keys.shape[-1] + values.shape[-1]) * keys.element_size()
    return keys.shape[0] * keys.shape[1] * state.seen * entry
