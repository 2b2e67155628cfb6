# SPDX-License-Identifier: Apache-2.0
"""Bytes and entries of a cache, counted from the tensors of its layers' states."""

from __future__ import annotations

from statistics import fmean

from torch import Tensor

from kvfold.cache.parts import CacheParts
from kvfold.cache.phase import Phase
from kvfold.cache.state import PER_HEAD, PER_ROW, LayerState
from kvfold.cache.stats import Stats
from kvfold.hf.stock_layers import bytes_held
from kvfold.kernels.cold_bytes import ColdBytes
from kvfold.methods.stages.when import Hold


def stats_of(cache: CacheParts) -> Stats:
    """The `Stats` of a cache."""
    phase, started = cache.phase, [state for state in cache.states if state.store is not None]
    counted: set[int] = set()
    parts = [state.stored().nbytes(counted) for state in started]
    entries, positions, slack = (
        (sum(each) for each in zip(*parts, strict=True)) if parts else (0, 0, 0)
    )
    cold = [state.stored().cold_bytes() for state in started] or [ColdBytes()]
    beside = sum(_beside(state) for state in started) + _bytes_of_all_layers(phase)
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
        other_bytes=bytes_held(cache.other_layers().values()),
        forced_over_budget=any(state.over_budget for state in started),
        inexact=cache.method.stages().inexact,
        later=fmean(map(_later, started)) if started else 0,
        later_budget=phase.own_size,
        errors=[_mean_report(state, "error") for state in started],
        refits=[_mean_report(state, "refit") for state in started],
        cold=ColdBytes(*map(sum, zip(*cold, strict=True))),
    )


def nbytes_per_row(cache: CacheParts) -> list[int]:
    """Bytes of each row of a cache as if it were alone: without padding, with room of its own.

    What observes all rows together is shared equally. Empty before the first token.
    """
    started = [state for state in cache.states if state.store is not None]
    of_layers, counted = [], set[int]()
    for state in started:
        kept, seen = (state.columns() >= 0).sum(-1), state.seen_per_row()
        whole = (kept == seen[:, None]).all(-1).tolist()
        stored = state.stored().nbytes_per_row(kept.tolist(), whole, counted)
        beside = _beside_per_row(state, kept.amax(-1).tolist())
        of_layers.append([sum(each) for each in zip(stored, beside, strict=True)])
    rows = [sum(each) for each in zip(*of_layers, strict=True)]
    shared = _bytes_of_all_layers(cache.phase)
    return [round(row + shared / len(rows)) for row in rows]


def _beside(state: LayerState) -> int:
    """Bytes of all tensors beside the store."""
    tensors = [getattr(state, name) for name in (*PER_HEAD, *PER_ROW)]
    given = None if state.reindexed is None else state.reindexed.given
    return (
        _nbytes(*tensors, *state.reports.values(), state.sequence.valid, given)
        + state.observers.nbytes()
    )


def _mean_report(state: LayerState, name: str) -> list[float]:
    """A report's numbers, means over rows; empty without one."""
    return state.reports[name].mean(0).tolist() if name in state.reports else []


def _later(state: LayerState) -> float:
    """Mean entries of a head that were appended after the last eviction."""
    holds = state.capacity is not None and isinstance(state.plan.stages.when, Hold)
    if holds and not state.phase.frozen:
        return 0
    return (state.columns() >= state.settled).sum(-1).double().mean().item()


def _beside_per_row(state: LayerState, longest: list[int]) -> list[float]:
    """Bytes beside the store of each row alone, whose longest head holds `longest` entries.

    A row alone has no padding that its tokens need to be told from.
    """
    store, rows = state.stored(), len(longest)
    per_entry = state.observers.number_bytes()
    others = _beside(state) - per_entry - _nbytes(state.sequence.valid)
    return [
        (others + per_entry * (count + store.dead) / max(1, store.length)) / rows
        for count in longest
    ]


def _bytes_of_all_layers(phase: Phase) -> int:
    """Bytes of the tensors that all layers share."""
    return sum(log.nbytes for log in phase.logs.values()) + _nbytes(phase.prefix)


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(each.numel() * each.element_size() for each in tensors if each is not None)


def _full_bytes(state: LayerState) -> int:
    """Bytes of a full cache: keys and values of all tokens seen."""
    keys, values = state.stored().keys, state.stored().values
    entry = (keys.shape[-1] + values.shape[-1]) * keys.element_size()
    return keys.shape[0] * keys.shape[1] * state.seen * entry
