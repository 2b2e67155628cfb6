# SPDX-License-Identifier: Apache-2.0
"""Copies of a compressed cache with a smaller budget, by the scores kept with its entries."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from kvfold.budget import Budget
from kvfold.cache import setup
from kvfold.cache.observe import observation_of_stored
from kvfold.cache.parts import CacheParts
from kvfold.cache.plan import checked_budget
from kvfold.cache.prefill import bring_to_budget
from kvfold.cache.sizes import even_size, size_of, without_room
from kvfold.cache.state import LayerState
from kvfold.errors import BudgetError, KvfoldError
from kvfold.kernels.full_precision import full_precision
from kvfold.methods.base import Across, Method, Stages, parts_of
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.pool import candidates_of
from kvfold.methods.stages.score.repetition import most_attention
from kvfold.observers.base import Needs
from kvfold.observers.fitted import EntryScorer
from kvfold.observers.reconstruction import ContextReconstruction

C = TypeVar("C", bound=CacheParts)


def shrunk(cache: C, budget: Budget | float | str) -> C:
    """A copy of `cache` with a smaller budget, as if its first prefill had been compressed to it.

    Only kept entries are copied. Raises as `shrink`.
    """
    # The stores share their entries until each has gathered what it keeps.
    stores = {id(state.store): state.stored().fork() for state in cache.states if state.store}
    other = copy.deepcopy(cache, dict(stores))
    shrink(other, budget)
    for state in other.states:
        state.stored().unshare()
    return other


@full_precision
@torch.no_grad()
def shrink(cache: CacheParts, budget: Budget | float | str) -> None:
    """Evicts to a smaller budget, in place, as if the first prefill had been compressed to it.

    One layer after another, so that no second cache is held; forks keep the entries that they
    share. Raises BudgetError for a larger budget; KvfoldError for a cache without kept scores, for
    one that has read or generated more since, and for a method that is not nested. The cache then
    stays as it is.
    """
    check_nested(cache.method)
    _check_settled(cache)
    stages = setup.stages_of(cache.method, cache.protect, cache.ranks, cache.fits)
    made = checked_budget(cache.method, budget, stages.forced.least)
    assert made is not None
    by_kept = cache.ranks.joining(_by_kept_scores(cache.method.stages(), stages))
    plans = [state.plan for state in cache.states]
    for state in cache.states:
        _check_smaller(state, made)
    observed = [(state, _observation(state)) for state in cache.states]
    try:
        for state, observation in observed:
            state.adopt(replace(state.plan, budget=made, stages=by_kept))
            _check_monotone(state, observation)
        cache.take(budget=made)
        plans = [replace(plan, budget=made) for plan in plans]
        for state, observation in observed:
            if state.reindexed is not None:
                # Sinks that have moved are written back in place, which no fork may see.
                state.put(copy.deepcopy(state.stored()))
            bring_to_budget(state, observation)
    finally:
        for state, plan in zip(cache.states, plans, strict=True):
            state.adopt(plan)


def check_nested(method: Method) -> None:
    """Raises KvfoldError for a method that is not nested."""
    if not is_nested(method):
        raise KvfoldError(
            f"{method} does not keep a part of its entries at a smaller budget, so that a "
            "compressed text cannot be shrunk: leave out keep_scores (--keep-scores), and compress "
            "the text again"
        )


def is_nested(method: Method) -> bool:
    """True if the method keeps, at a smaller budget, a part of what it keeps at a larger one."""
    nested = all(part.nested for part in parts_of(method))
    return nested and method.takes_budget


def _check_settled(cache: CacheParts) -> None:
    """Raises KvfoldError unless the cache is as its first prefill's compression left it."""
    states = cache.states
    if any(
        state.observers.kept.scores is None and EntryScorer not in state.needs for state in states
    ):
        raise KvfoldError(
            "this cache keeps no scores of its entries: compress the text with keep_scores=True"
        )
    later = any(state.evictions != 1 or state.settled != state.seen for state in states)
    if later or cache.phase.frozen or cache.per_chunk is not None:
        raise KvfoldError(
            "a cache shrinks as its first prefill left it, and this one was compressed more than "
            "once, or has read on: compress the text again"
        )


def _check_smaller(state: LayerState, budget: Budget) -> None:
    """Raises BudgetError if the `budget` keeps more entries than the state's own."""
    before, smaller = even_size(state), replace(state, plan=replace(state.plan, budget=budget))
    now = even_size(smaller)
    tokens = state.seen_per_row() - state.protected()
    larger = now.minimum(tokens) > before
    if bool((larger & without_room(smaller)).any()):
        raise BudgetError(
            f"{budget} leave no room beside the entries that always stay (sinks, window, protected "
            "spans), so nothing would be evicted: choose a larger budget"
        )
    if bool(larger.any()):
        raise BudgetError(
            f"a cache that was compressed to {state.plan.budget} cannot grow to {budget}: choose a "
            "smaller budget, or compress the text again"
        )


def _check_monotone(state: LayerState, observation: Observation) -> None:
    """Raises KvfoldError if the layer would keep more entries than it holds."""
    if isinstance(state.plan.stages.allocate, Across):
        return
    tokens = state.seen_per_row()
    wanted = (size_of(state, observation) + state.protected()).minimum(tokens)
    held = (state.columns() >= 0).sum(-1).amin(-1)
    if bool((wanted > held).any()):
        raise KvfoldError(
            f"layer {state.plan.layer} keeps more entries at {state.plan.budget} than now: "
            "compress the text again"
        )


def _by_kept_scores(own: Stages, stages: Stages) -> Stages:
    """`stages` by kept scores in place of those of the method's `own` stages."""
    allocate = own.allocate
    if isinstance(allocate, Across):
        if getattr(allocate.statistic, "keywords", {}).get("score") is not own.score:
            raise KvfoldError("sizes depend on more than scores: compress the text again")
        allocate = replace(allocate, statistic=partial(candidates_of, score=most_attention))
    return replace(stages, needs=Needs(), score=most_attention, allocate=allocate)


def _observation(state: LayerState) -> Observation:
    """Positions of a layer's entries, and their kept scores, or those of its fitted scorer."""
    store, scores = state.stored(), state.observers.kept.scores
    if scores is None:
        scores = observation_of_stored(state).learned_scores()
    return Observation(
        store.keys[:, :, :0],
        store.values[:, :, :0],
        state.positions(),
        observed={ContextReconstruction: scores},
        tokens_seen=state.seen_per_row(),
        layer=state.plan.layer,
        layers=state.plan.layers,
    )
