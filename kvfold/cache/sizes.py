# SPDX-License-Identifier: Apache-2.0
"""Sizes of layers and heads by the budget: of one layer, or of all layers together."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvfold.cache.plan import with_forced_room
from kvfold.cache.state import LayerState
from kvfold.methods.base import Across
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.rounding import UNLIMITED
from kvfold.methods.stages.select.forced import with_forced
from kvfold.store.encoding import BIAS_BYTES, EntrySize

# A layer, its observation, and its entries per KV head, `[B]` or `[B, H]`
Sized = tuple[LayerState, Observation, Tensor]


def size_of(state: LayerState, observation: Observation) -> Tensor:
    """Entries per KV head, `[B]` or `[B, H]`; uniform if the size depends on other layers."""
    if isinstance(state.plan.stages.allocate, Across):
        return even_size(state)
    free = state.seen_per_row() - state.protected()
    return state.plan.counts(observation, free, _entry_size(state), _heads(state))


def even_size(state: LayerState, unrounded: bool = False, free: Tensor | None = None) -> Tensor:
    """Budget in entries per KV head and layer `[B]`, without protected ones.

    `free [B]` are the tokens of which a ratio is kept, None: those seen. Int64, or with `unrounded`
    float64 before rounding down.
    """
    free = state.seen_per_row() - state.protected() if free is None else free
    plan, size, heads = state.plan, _entry_size(state), _heads(state)
    if unrounded:
        exact = [plan.unrounded(n, size, heads, len(free)) for n in free.tolist()]
        return torch.tensor(exact, device=free.device, dtype=torch.float64)
    totals = [plan.total(n, size, heads, len(free)) for n in free.tolist()]
    return torch.tensor(totals, device=free.device) // plan.layers


def sized_together(
    state: LayerState, observation: Observation, free: Tensor, beside: Tensor | None = None
) -> list[Sized]:
    """Lets the layer wait; the last one gives all layers with their sizes, the others give none.

    A ratio is one of `free [B]` tokens; `beside [B, H, T]` entries do not count in the sizes.
    """
    waiting, plan = state.waiting, state.plan
    across = plan.stages.allocate
    assert isinstance(across, Across)
    if across.per_head:
        observation = _with_candidates(state, observation, beside)
    # A view of the window queries would keep the whole prompt's queries alive.
    queries = None if observation.queries is None else observation.queries.clone()
    waiting.sized.append((state, dataclasses.replace(observation, queries=queries)))
    if len(waiting.sized) < plan.layers:
        return []
    waited = waiting.take_sized()
    seen = state.seen_per_row() - state.protected()
    statistics = [across.statistic(of_layer).to(seen.device) for _, of_layer in waited]
    # Without a budget the statistics alone decide.
    budget = seen if plan.budget is None else even_size(state, across.unrounded, free)
    counts = across.share(statistics, budget, seen)
    if plan.budget is not None and not across.per_head:
        counts = with_forced_room(counts, plan.stages.forced.least_of(state.positions()), seen)
    shared = zip(waited, counts, strict=True)
    # Layers may lie on several GPUs.
    return [(*one, count.to(one[1].positions.device)) for one, count in shared]


def open_rows(sized: list[Sized], beside_prompt: bool = False) -> Tensor:
    """Rows `[B, 1]` whose heads have no sizes yet, as nothing leaves them or, `beside_prompt`, may.

    Heads without a limit have their size. Empty if heads do not differ.
    """
    rows = []
    for _, observation, counts in (each for each in sized if each[2].dim() > 1):
        assert observation.candidates is not None
        stay = counts >= (observation.candidates > -torch.inf).sum(-1)
        rows.append(((stay | beside_prompt) & (counts < UNLIMITED)).all(-1))
    if not rows:
        return torch.zeros(0, 1, dtype=torch.bool)
    ranks, in_all = sized[0][0].plan.ranks, torch.stack([row.to(rows[0].device) for row in rows])
    each_row = [[ranks.all(row)] for row in in_all.all(0)]
    return torch.tensor(each_row, device=rows[0].device)


def _with_candidates(
    state: LayerState, observation: Observation, beside: Tensor | None
) -> Observation:
    """Observation with the addends that tell forced entries and those in the prefix from others."""
    positions = state.positions()
    forced = state.plan.stages.forced.mask(positions, torch.zeros_like(state.seen_per_row()))
    none = torch.zeros(positions.shape, dtype=torch.float32, device=positions.device)
    candidates = with_forced(none, forced, positions)
    outside = positions < state.protected().view(-1, 1, 1)
    outside = outside if beside is None else outside | beside
    return dataclasses.replace(observation, candidates=candidates.masked_fill(outside, -torch.inf))


def _heads(state: LayerState) -> int:
    """Number of the layer's KV heads on all ranks together."""
    return state.stored().keys.shape[1] * state.plan.ranks.size


def _entry_size(state: LayerState) -> EntrySize:
    keys, values, refit = state.stored().keys, state.stored().values, state.plan.stages.refit
    bias = BIAS_BYTES if refit is not None and refit.gives_bias else 0
    return EntrySize(keys.shape[-1], values.shape[-1], keys.element_size(), bias)
