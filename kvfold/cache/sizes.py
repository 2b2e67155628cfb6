# SPDX-License-Identifier: Apache-2.0
"""Sizes of layers and heads by the budget: of one layer, or of all layers together."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvfold.cache.plan import with_forced_room
from kvfold.cache.state import LayerState
from kvfold.errors import BudgetError, KvfoldError
from kvfold.methods.base import Across, Stages
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.rounding import UNLIMITED
from kvfold.methods.stages.select.forced import Forced
from kvfold.methods.stages.select.top import with_forced
from kvfold.store.encoding import BIAS_BYTES, EntrySize

# A layer, its observation, and its entries per KV head, `[B]` or `[B, H]`
Sized = tuple[LayerState, Observation, Tensor]


def size_of(state: LayerState, observation: Observation) -> Tensor:
    """Entries per KV head, `[B]` or `[B, H]`; uniform if the size depends on other layers."""
    if isinstance(state.plan.stages.allocate, Across):
        return even_size(state)
    free = _free(state)
    whole = without_room(state, free)
    return state.plan.counts(observation, free, whole, _entry_size(state), _heads(state))


def without_room(state: LayerState, free: Tensor | None = None) -> Tensor:
    """Rows `[B]` from which nothing leaves, as forced entries take all of a ratio of `free [B]`.

    None: of the tokens seen. Raises BudgetError for bytes that do not hold the forced entries;
    tokens were checked beforehand.
    """
    free, plan = _free(state) if free is None else free, state.plan
    if plan.budget is None or plan.budget.kind == "tokens":
        return torch.zeros_like(free, dtype=torch.bool)
    forced, positions = plan.stages.forced, state.positions()
    if plan.stages.keeps_prompt:  # only the answer's entries count, which are to come
        least = torch.full_like(free, Forced(recent=forced.recent).least)
    else:
        inside = positions >= state.protected().view(-1, 1, 1)
        least = (forced.mask(positions, torch.zeros_like(free)) & inside).sum(-1).amax(-1)
    unrounded = isinstance(plan.stages.allocate, Across) and plan.stages.allocate.unrounded
    share = _share(state, unrounded, free)
    if plan.budget.kind == "ratio":
        return share <= least
    if bool((share < least.minimum(free)).any()):
        raise BudgetError(
            f"{plan.stages.method} always keeps {int(least.max())} entries per KV head (sinks, "
            f"window, protected spans), and {plan.budget} hold {int(share.min())}: raise the budget"
        )
    return torch.zeros_like(free, dtype=torch.bool)


def even_size(state: LayerState, unrounded: bool = False, free: Tensor | None = None) -> Tensor:
    """Budget in entries per KV head and layer `[B]`, without protected ones; all where none leaves.

    `free [B]` are the tokens of which a ratio is kept, None: those seen. Int64, or with `unrounded`
    float64 before rounding down.
    """
    free = _free(state) if free is None else free
    share = _share(state, unrounded, free)
    return torch.where(without_room(state, free), free.to(share.dtype), share)


def _free(state: LayerState) -> Tensor:
    """Tokens `[B]` seen by each row, without protected ones."""
    return state.seen_per_row() - state.protected()


def _share(state: LayerState, unrounded: bool, free: Tensor) -> Tensor:
    """Budget in entries per KV head and layer `[B]`, as of `even_size`, room or not."""
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
    plan = state.plan
    across = plan.stages.allocate
    assert isinstance(across, Across)
    if across.per_head:
        observation = _with_candidates(state, observation, beside)
    # A view of the window queries would keep the whole prompt's queries alive.
    queries = None if observation.queries is None else observation.queries.clone()
    due = state, dataclasses.replace(observation, queries=queries)
    waited = state.barrier.sized.arrive(due, plan.layers)
    if not waited:
        return []
    seen, whole = _free(state), without_room(state, free)
    statistics = [across.statistic(of_layer).to(seen.device) for _, of_layer in waited]
    # Without a budget the statistics alone decide.
    budget = seen if plan.budget is None else even_size(state, across.unrounded, free)
    counts = across.share(statistics, budget, seen)
    _check_limited(plan.stages, counts)
    if plan.budget is not None and not across.per_head:
        counts = with_forced_room(counts, plan.stages.forced.least_of(state.positions()), seen)
    sized = []
    for (each, of_layer), count in zip(waited, counts, strict=True):
        rows = whole.view(-1, *[1] * (count.dim() - 1)).to(count.device)
        count = count.masked_fill(rows, UNLIMITED)
        sized.append((each, of_layer, count.to(of_layer.positions.device)))  # on its layer's GPU
    return sized


def _check_limited(stages: Stages, counts: list[Tensor]) -> None:
    """Raises KvfoldError for layers or heads without a limit where all keep whole pages."""
    if isinstance(stages.shape, int) and any(bool((each >= UNLIMITED).any()) for each in counts):
        raise KvfoldError(
            f"{stages.method} keeps some layers or heads whole, which then hold parts of pages: "
            "leave pages out, or choose a method that gives each a size, such as kvzip"
        )


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
    return torch.tensor([[ranks.all(row)] for row in in_all.all(0)], device=rows[0].device)


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
