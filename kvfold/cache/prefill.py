# SPDX-License-Identifier: Apache-2.0
"""Prefill eviction: a layer is brought to its budget when a prefill ends.

Functions of (state, observation): allocate → choose → merge → refit → move → keep → encode.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor

from kvfold.budget import Budget
from kvfold.cache.barrier import EvictionDue
from kvfold.cache.consecutive import moved_up
from kvfold.cache.encode import encode_due
from kvfold.cache.level import alike
from kvfold.cache.observe import observation_of
from kvfold.cache.refit import refitted
from kvfold.cache.sizes import open_rows, size_of, sized_together, without_room
from kvfold.cache.state import LayerState
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.interruption import check_interrupted
from kvfold.kernels.gather import alive, pick
from kvfold.methods.base import Across, Measured, Stages
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.rounding import UNLIMITED
from kvfold.methods.stages.merge.base import Eviction
from kvfold.methods.stages.select.choose import Chosen, choose, scores_of
from kvfold.methods.stages.select.one_set import Rule
from kvfold.methods.stages.select.top import kept_mask
from kvfold.methods.stages.when import Once
from kvfold.observers.call import AttentionCall
from kvfold.observers.column_sums import ColumnSums
from kvfold.observers.reconstruction import ContextReconstruction
from kvfold.observers.references import ReferencesNeed
from kvfold.store.encoding import Encode
from kvfold.store.ragged import RaggedStore


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
            _encode_all(state, observation)
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
        _encode_all(state, observation)
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
    elif state.plan.stages.encode is not None:
        _encode_all(state, observation)
    if ContextReconstruction in state.needs:
        state.observers[ContextReconstruction].forget()
    if all(due.layer is not state for due in state.barrier.agreeing.arrived):
        _forget_references(state)
    state.settle()


def evict(
    state: LayerState,
    observation: Observation,
    counts: Tensor,
    sizes: Tensor | None = None,
    beside: Tensor | None = None,
) -> None:
    """Keeps the `counts`, `[B]` or `[B, H]`, best entries of each head, forced ones first.

    `sizes` and `beside` are those of `choose`. Layers that agree wait for the last one.
    """
    due, stages = EvictionDue(state, observation, counts, sizes, beside), state.plan.stages
    if counts.dim() > 1:
        _check_heads(state, observation)
    if stages.level is None:
        _evict(due, stages)
        return
    layers = state.barrier.agreeing.arrive(due, state.plan.layers)
    if layers:
        if stages.level == "best":
            _evict_alike(layers)
        else:
            _evict_level(layers, stages.level)
        for waited in layers:
            _forget_references(waited.layer)


def _forget_references(state: LayerState) -> None:
    """Drops the queries to which the layer's entries have been fitted."""
    if ReferencesNeed in state.needs:
        state.observers[ReferencesNeed].forget()


def _evict_alike(layers: list[EvictionDue[LayerState]]) -> None:
    """Evicts by each entry's highest score in any layer and head, the same for all."""
    own = [_chosen(due, due.layer.plan.stages).scores for due in layers]
    device = own[0].device
    highest = torch.stack([each.amax(1, keepdim=True).to(device) for each in own]).amax(0)
    for due, scores in zip(layers, own, strict=True):
        shared = partial(_as_scored, scores=highest.to(scores.device).expand_as(scores))
        _evict(due, dataclasses.replace(due.layer.plan.stages, score=shared))


def _evict_level(layers: list[EvictionDue[LayerState]], rule: Rule) -> None:
    """Evicts to one set of tokens of each row, made of what every head would keep by itself."""
    own = [_chosen(due, due.layer.plan.stages) for due in layers]
    slots = alike(own, positions := layers[0].layer.positions(), rule)
    whole = slots.shape == positions.shape and bool((slots >= 0).all())
    for due, each in zip(layers, own, strict=True):
        if whole:
            _keep_everything(due.layer, due.observation, due.layer.positions(), due.counts)
        else:
            chosen = dataclasses.replace(each, slots=slots.to(each.slots.device))
            _keep_chosen(due, chosen, ragged=False)


def _as_scored(observation: Observation, scores: Tensor) -> Tensor:
    return scores


def _evict(due: EvictionDue[LayerState], stages: Stages) -> None:
    state, observation, counts, sizes, beside = due
    positions = state.positions()
    stored = (positions >= 0).sum(-1)
    if state.plan.ranks.all((_most(counts, sizes, beside) >= stored).all()):
        if state.plan.scores_stay:
            budget = counts if counts.dim() == 1 else counts.amax(-1)
            observed = dataclasses.replace(observation, budget=budget)
            scores = scores_of(stages, observed, positions.shape[1])
            state.observers.kept.set(scores.masked_fill(positions < 0, torch.nan))
        _keep_everything(state, observation, positions, counts)
        return
    chosen = _chosen(due, stages)
    if stages.rounds and stages.rounds.sizes == "fixed" and stages.heads is not None:
        state.settle_heads(stored, (chosen.slots >= 0).sum(-1))
    _keep_chosen(due, chosen, ragged=stages.heads is not None or counts.dim() > 1)


def _keep_chosen(due: EvictionDue[LayerState], chosen: Chosen, ragged: bool) -> None:
    state, observation, counts, *_ = due
    state.note_size(state.capacity, state.over_budget or chosen.over_budget)
    if state.plan.scores_stay:
        state.observers.kept.set(chosen.scores)
    _note_error(state, observation, chosen.slots)
    if state.applies(chosen):
        _note_surplus(state, (chosen.slots >= 0).sum(-1), counts)
        _keep(state, observation, chosen.slots, ragged)


def _chosen(due: EvictionDue[LayerState], stages: Stages) -> Chosen:
    check_interrupted()
    state, observation, counts, sizes, beside = due
    positions = state.positions()
    forced = positions < state.protected().view(-1, 1, 1)
    fixed = state.stored().fixed
    if fixed is not None:
        forced = forced | fixed
    forced = forced & (positions >= 0)
    return choose(stages, observation, positions, forced, counts, sizes, beside)


def _most(counts: Tensor, sizes: Tensor | None, beside: Tensor | None) -> Tensor:
    """Most entries that each head may keep, `[B, 1]` or `[B, H]`."""
    most = counts.view(len(counts), -1)
    if beside is not None:
        most = most + beside.sum(-1)
    return most if sizes is None else torch.where(sizes < 0, most, sizes)


# --- sizes of all layers --------------------------------------------------------------------


def _wait_for_sizes(state: LayerState, observation: Observation) -> None:
    """Lets the layer wait; the last one computes all sizes, and all layers evict."""
    sized = sized_together(state, observation, state.seen_per_row() - state.protected())
    open_ = open_rows(sized, beside_prompt=state.plan.stages.keeps_prompt)
    for each, of_layer, count in sized:
        evict_to(each, of_layer, count)
        if each.head_sizes is not None and count.dim() > 1:
            each.note_head_sizes(each.head_sizes, open_)


# --- kept entries ---------------------------------------------------------------------------


def _keep_everything(
    state: LayerState, observation: Observation, positions: Tensor, counts: Tensor
) -> None:
    """Evicts nothing, as no head stores more than its count; `positions [B, H, T]`."""
    slots = torch.arange(positions.shape[-1], device=positions.device)
    _note_error(state, observation, slots.expand_as(positions))
    _note_surplus(state, (positions >= 0).sum(-1), counts)
    if state.sequence.valid is not None and state.surplus == 0 and state.stored().is_dense:
        # Padding becomes holes, which decode eviction ignores.
        state.dense_store().place(state.columns())
    if state.plan.stages.encode is not None:
        _encode_all(state, observation)
    if state.stored().dead:
        # Drop holes: from here on the recent window is counted in slots.
        state.copy_alive()


def _keep(state: LayerState, observation: Observation, slots: Tensor, ragged: bool) -> None:
    """Keeps the entries at `slots [B, H, K]`, merges the others into them, moves and encodes."""
    check_interrupted()
    stages, store = state.plan.stages, state.stored()
    changed = moves = bias = None
    state.return_sinks()
    if stages.merge is not None:
        keys, values = store.dense()
        held = state.observers.get(ColumnSums)
        sums = None if held is None else held.of(state, None)
        eviction = Eviction(
            keys, values, state.positions(), slots, sums, state.merging, observation.seed
        )
        *changed, merging = stages.merge(eviction)
        state.note_merging(merging)
    fitted = refitted(state, observation, slots)
    if fitted is not None:
        changed, bias = fitted
    if stages.positions == "consecutive":
        changed, moves = moved_up(state, slots, changed)
    if ragged or stages.encode is not None:
        _keep_ragged(state, observation, slots, changed, bias)
    else:
        state.keep(slots)
        if changed is not None:
            state.dense_store().replace(*changed)
        if bias is not None:
            state.stored().set_bias(bias)
    if moves is not None:
        state.observers.moves.set(moves)
    state.note_eviction()


def _keep_ragged(
    state: LayerState,
    observation: Observation,
    slots: Tensor,
    changed: list[Tensor] | None,
    bias: Tensor | None,
) -> None:
    """Keeps the entries at `slots [B, H, K]` in a ragged store, and encodes those due.

    `changed` are their keys and values, `bias [B, H, K]` theirs; None: as stored.
    """
    encode, store = state.plan.stages.encode or Encode(), state.stored()
    _check_heads(state, observation)
    if store.encoded and (changed is None or not encode.standalone):
        store.keep(slots)
    else:
        columns = None if _is_everything(state, slots) else store.columns
        entries, taken, biases = store.dense(), slots, store.bias
        if changed is not None:
            # Changed entries are in the order of the slots, and taken from there.
            entries = changed[0], changed[1]
            columns = store.columns.gather(2, slots.clamp(min=0))
            stored = None if biases is None else pick(biases, slots, 0)
            biases = stored if bias is None else bias
            order = torch.arange(slots.shape[-1], device=slots.device)
            taken = order.expand_as(slots).masked_fill(slots < 0, -1)
        state.put(RaggedStore(*entries, columns, taken, encode, biases))
    # Raw entries need no observation of the kept ones, which is a copy.
    kept = observation.at(slots) if state.plan.stages.encode is not None else None
    encode_due(state, decoding=False, observation=kept)
    state.observers.select(slots)


def _encode_all(state: LayerState, observation: Observation) -> None:
    """Evicts nothing but padding, and encodes."""
    _keep(state, observation, alive(state.positions()), ragged=True)


def _evict_own(state: LayerState, observation: Observation, most: int) -> None:
    """Evicts a fork's own entries to the `most` best of each head, beside the shared ones."""
    own, positions = state.stored().own_length, state.positions()
    if own <= most:
        return
    shared = torch.arange(positions.shape[-1], device=positions.device) < positions.shape[-1] - own
    counts = torch.full((len(positions),), most, device=positions.device)
    evict(state, observation, counts, beside=shared & (positions >= 0))


# --- checks and notes -----------------------------------------------------------------------


def _check_own_forwards_ran(state: LayerState) -> None:
    """Raises KvfoldError for a first prefill without the method's own forwards.

    Entries of later prefills are added to those that the first one kept.
    """
    if state.rounds == 1:
        raise KvfoldError(
            "this method runs forwards of its own over a first prompt: use kvfold.compress or "
            "kvfold.generate, with a cache that was given tokenizer= where it needs one"
        )


def _check_heads(state: LayerState, observation: Observation) -> None:
    """Raises UnsupportedModel if heads have no entries of their own (latents)."""
    if observation.keys.shape[1] != state.stored().keys.shape[1]:
        raise UnsupportedModel(
            "this model's cache holds latents, one for all heads: budgets per head, packed, "
            "pruned and paired entries need keys of each head"
        )


def _is_everything(state: LayerState, slots: Tensor) -> bool:
    """True if slot i is column i before and after keeping `slots [B, H, K]`."""
    store = state.stored()
    untouched = store.is_dense and state.dense_store().stored_columns is None
    whole = untouched and slots.shape[-1] == store.length
    return state.plan.ranks.all((slots >= 0).all() & whole)


def _note_surplus(state: LayerState, kept: Tensor, counts: Tensor) -> None:
    """Sets `surplus` to 0 if every head holds exactly its capacity, else to None."""
    exact = state.capacity is not None and bool((kept == counts.view(len(counts), -1)).all())
    state.note_surplus(exact)


def _note_error(state: LayerState, observation: Observation, slots: Tensor) -> None:
    """Notes the output error that a method without a budget predicts and measures."""
    allocate = state.plan.stages.allocate
    if isinstance(allocate, Measured) and allocate.error is not None:
        kept = kept_mask(slots, observation.positions.shape[-1])
        state.report("error", allocate.error(observation, kept))
