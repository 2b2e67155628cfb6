# SPDX-License-Identifier: Apache-2.0
"""Evictions due when a prefill ends: a layer comes to its budget, whose sizes are computed here.

`evict.py` chooses and applies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.budget import Budget
from kvfold.cache.evict import encode_all, evict, forget_references
from kvfold.cache.observe import observation_of
from kvfold.cache.sizes import open_rows, size_of, sized_together, without_room
from kvfold.cache.state import LayerState
from kvfold.errors import KvfoldError
from kvfold.methods.base import Across
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.rounding import UNLIMITED
from kvfold.methods.stages.when import Once
from kvfold.observers.call import AttentionCall
from kvfold.observers.reconstruction import ContextReconstruction


def end_with(state: LayerState, call: AttentionCall) -> None:
    """Ends the prefill with its last call; see `end_prefill`."""
    state.observers.last_piece(state)
    end_prefill(state, observation_of(state, call))


def end_prefill(state: LayerState, observation: Observation) -> None:
    """Evicts the layer to its budget, now or when the last layer has attended.

    Raises KvfoldError for a first prefill without the method's own forwards.
    """
    stages = state.plan.stages
    state.begin_eviction()
    state.observers.end_prefill(state)
    if state.phase.own_size is not None:
        _evict_own(state, observation, state.phase.own_size)
        return
    own_forwards = stages.token_pruning or (
        ContextReconstruction in stages.needs
        and state.observers[ContextReconstruction].scores is None
    )
    if own_forwards:
        _check_own_forwards_ran(state)
        if stages.encode is not None:
            encode_all(state, observation)
        return
    if isinstance(stages.when, Once):
        state.wait_for_token()
        return
    if stages.rounds:
        state.begin_rounds(observation)
    state.settle()
    if state.phase.awaits_logits:
        state.barrier.unjudged.arrived.append((state, observation))
    else:
        bring_to_budget(state, observation)


def bring_to_budget(state: LayerState, observation: Observation) -> None:
    """Evicts the layer to its budget; if sizes depend on other layers, the last one evicts all."""
    stages = state.plan.stages
    if isinstance(stages.allocate, Across):
        _wait_for_sizes(state, observation)
    elif stages.score is not None or stages.encode is not None:
        size_and_evict(state, observation)


def size_and_evict(state: LayerState, observation: Observation) -> None:
    """Evicts to the layer's own size; without a score stage, encodes only."""
    if state.plan.stages.score is None:
        encode_all(state, observation)
    else:
        evict_to(state, observation, size_of(state, observation))


def evict_to(state: LayerState, observation: Observation, counts: Tensor) -> None:
    """Brings the layer to `counts`, `[B]` or `[B, H]`, entries per KV head."""
    everything = state.plan.budget == Budget.ratio(1.0) or bool((counts == UNLIMITED).all())
    counts = counts + state.protected().view(-1, *[1] * (counts.dim() - 1))
    over = bool((without_room(state) & (state.plan.budget != Budget.ratio(1.0))).any())
    state.note_size(None if everything or counts.dim() > 1 else counts, over)
    if state.plan.stages.rounds and counts.dim() > 1 and not everything:
        state.note_head_sizes(counts)
    if not state.plan.stages.keeps_prompt:
        evict(state, observation, counts)
    else:
        if state.plan.stages.encode is not None:
            encode_all(state, observation)
        forget_references(state)
    if ContextReconstruction in state.needs:
        state.observers[ContextReconstruction].forget()
    state.settle()


def _evict_own(state: LayerState, observation: Observation, most: int) -> None:
    """Evicts a fork's own entries to the `most` best of each head, beside the shared ones."""
    own, positions = state.stored().own_length, state.positions()
    if own <= most:
        return
    shared = torch.arange(positions.shape[-1], device=positions.device) < positions.shape[-1] - own
    counts = torch.full((len(positions),), most, device=positions.device)
    evict(state, observation, counts, beside=shared & (positions >= 0))


def _wait_for_sizes(state: LayerState, observation: Observation) -> None:
    """Lets the layer wait; the last one computes all sizes, and all layers evict."""
    sized = sized_together(state, observation, state.seen_per_row() - state.protected())
    open_ = open_rows(sized, beside_prompt=state.plan.stages.keeps_prompt)
    for each, of_layer, count in sized:
        evict_to(each, of_layer, count)
        if each.head_sizes is not None and count.dim() > 1:
            each.note_head_sizes(each.head_sizes, open_)


def _check_own_forwards_ran(state: LayerState) -> None:
    """Raises KvfoldError for a first prefill without the method's own forwards.

    Entries of later prefills are added to those that the first one kept.
    """
    if state.evictions == 1:
        raise KvfoldError(
            "this method runs forwards of its own over a first prompt: use kvfold.compress or "
            "kvfold.generate, with a cache that was given tokenizer= where it needs one"
        )
