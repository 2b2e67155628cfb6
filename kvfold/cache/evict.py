# SPDX-License-Identifier: Apache-2.0
"""One eviction of a layer: due → choose (pure) → apply → forget.

`prefill.py` and `rounds.py` say what is due, and how many entries stay: `evict` is the way of all
evictions but that of one entry a step (`decode.py`). It applies what was chosen in this order:
merge → refit → move → keep → encode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kvfold.cache.barrier import EvictionDue
from kvfold.cache.consecutive import moved_up
from kvfold.cache.encode import encode_due
from kvfold.cache.level import alike
from kvfold.cache.pages import in_pages
from kvfold.cache.refit import refitted
from kvfold.cache.state import LayerState
from kvfold.errors import BudgetError, UnsupportedModel
from kvfold.interruption import check_interrupted
from kvfold.kernels.gather import alive, pick
from kvfold.methods.base import Across, Measured
from kvfold.methods.observation import Observation
from kvfold.methods.stages.merge.base import Eviction
from kvfold.methods.stages.select.choose import Chosen, choose, scores_of
from kvfold.methods.stages.select.top import kept_mask
from kvfold.observers.column_sums import ColumnSums
from kvfold.observers.references import ReferencesNeed
from kvfold.store.encoding import Encode
from kvfold.store.ragged import RaggedStore

Due = EvictionDue[LayerState]


def evict(
    state: LayerState,
    observation: Observation,
    counts: Tensor,
    sizes: Tensor | None = None,
    beside: Tensor | None = None,
) -> None:
    """Keeps the `counts`, `[B]` or `[B, H]`, best entries of each head, forced ones first.

    `sizes` and `beside` are those of `choose`. Layers that keep one set of tokens, or share their
    pages, wait for the last one. Raises UnsupportedModel for `counts [B, H]` of heads that share
    entries (latents).
    """
    stages = state.plan.stages
    due = EvictionDue(state, stages, observation, counts, sizes, beside)
    if counts.dim() > 1:
        _check_heads(state, observation)
    if stages.shape is None:
        choices: Iterable[tuple[Due, Chosen | None]] = [(due, _choose(due))]
    else:
        waited = state.barrier.agreeing.arrive(due, _shaped_together(state))
        choices = _in_pages(waited) if isinstance(stages.shape, int) else _one_set(waited)
    for each, chosen in choices:
        _apply(each, chosen)
        forget_references(each.layer)


def encode_all(state: LayerState, observation: Observation) -> None:
    """Evicts nothing but padding, and encodes; recall lets go cold what no stage forces."""
    positions, stages = state.positions(), state.plan.stages
    if stages.encode is not None and stages.encode.recalls and stages.score is None:
        counts = torch.zeros(len(positions), dtype=torch.long, device=positions.device)
        forced = _protected(state, positions) | stages.forced.mask(positions, counts)
        positions = positions.masked_fill(~forced, -1)
    _keep(state, observation, alive(positions), ragged=True)


def forget_references(state: LayerState) -> None:
    """Drops the queries to which the layer's entries have been fitted."""
    if ReferencesNeed in state.needs:
        state.observers[ReferencesNeed].forget()


# --- choose ---------------------------------------------------------------------------------


def _choose(due: Due) -> Chosen | None:
    """The entries that stay; None: all, as no head stores more than its count."""
    stored = (due.layer.positions() >= 0).sum(-1)
    most = _most(due.counts, due.sizes, due.beside)
    return None if due.layer.plan.ranks.all((most >= stored).all()) else _chosen(due)


def _chosen(due: Due) -> Chosen:
    """The entries that stay, even if none has to leave."""
    check_interrupted()
    state, stages, observation, counts, sizes, beside = due
    positions = state.positions()
    forced = _protected(state, positions)
    fixed = state.stored().fixed
    if fixed is not None:
        forced = forced | fixed
    forced = forced & (positions >= 0)
    return choose(stages, observation, positions, forced, counts, sizes, beside)


def _protected(state: LayerState, positions: Tensor) -> Tensor:
    """Bool mask `[B, H, T]` of the first tokens that are kept beside the budget, and of padding."""
    return positions < state.protected().view(-1, 1, 1)


def _shaped_together(state: LayerState) -> int:
    """Number of layers whose choices are shaped together.

    Pages are a layer's own, unless the sizes of all layers were made together.
    """
    stages = state.plan.stages
    apart = isinstance(stages.shape, int) and not isinstance(stages.allocate, Across)
    return 1 if apart else state.plan.layers


def _in_pages(layers: Sequence[Due]) -> Iterator[tuple[Due, Chosen | None]]:
    """Whole pages of each head, of what it would keep by itself; none while some have not arrived.

    Where no entry leaves any layer, all stay. Raises BudgetError as `in_pages`.
    """
    own = [_choose(due) for due in layers]
    if all(each is None for each in own):
        yield from zip(layers, own, strict=True)
        return
    known = [_chosen(due) if each is None else each for due, each in zip(layers, own, strict=True)]
    states, size = [due.layer for due in layers], layers[0].stages.shape
    assert isinstance(size, int)
    seen = [state.seen_per_row() for state in states]
    try:
        paged = in_pages(known, [state.positions() for state in states], seen, size)
    except BudgetError as problem:
        raise BudgetError(f"{layers[0].stages.method}: {problem}") from None
    for state, each in zip(states, known, strict=True):
        _settle_heads(state, each)  # parts of pages count in later rounds
    yield from zip(layers, paged, strict=True)


def _one_set(layers: Sequence[Due]) -> Iterator[tuple[Due, Chosen | None]]:
    """One set of tokens of each row, for all layers; none while some have not arrived.

    By the rule "best" it has the entries of the highest scores in any layer and head; by others it
    is made of what every head would keep by itself.
    """
    if not layers:
        return
    own, level = [_chosen(due) for due in layers], layers[0].stages.shape
    assert isinstance(level, str)
    if level == "best":
        device = own[0].scores.device
        every = [each.scores.amax(1, keepdim=True).to(device) for each in own]
        highest = torch.stack(every).amax(0)
        for due, each in zip(layers, own, strict=True):
            scores = highest.to(each.scores.device).expand_as(each.scores)
            stages = dataclasses.replace(due.stages, score=partial(_as_scored, scores=scores))
            due = due._replace(stages=stages)
            yield due, _choose(due)
        return
    slots = alike(own, positions := layers[0].layer.positions(), level)
    whole = slots.shape == positions.shape and bool((slots >= 0).all())
    for due, each in zip(layers, own, strict=True):
        chosen = dataclasses.replace(each, slots=slots.to(each.slots.device))
        yield due, None if whole else chosen


def _as_scored(observation: Observation, scores: Tensor) -> Tensor:
    return scores


def _most(counts: Tensor, sizes: Tensor | None, beside: Tensor | None) -> Tensor:
    """Most entries that each head may keep, `[B, 1]` or `[B, H]`."""
    most = counts.view(len(counts), -1)
    if beside is not None:
        most = most + beside.sum(-1)
    return most if sizes is None else torch.where(sizes < 0, most, sizes)


# --- apply ----------------------------------------------------------------------------------


def _apply(due: Due, chosen: Chosen | None) -> None:
    """Lets the entries that are not chosen leave the layer; None: all stay."""
    state, stages, observation, counts, *_ = due
    if chosen is None:
        positions = state.positions()
        if state.plan.scores_stay:
            budget = counts if counts.dim() == 1 else counts.amax(-1)
            observed = dataclasses.replace(observation, budget=budget)
            scores = scores_of(stages, observed, positions.shape[1])
            state.observers.kept.set(scores.masked_fill(positions < 0, torch.nan))
        _keep_everything(state, observation, positions, counts)
        return
    kept = (chosen.slots >= 0).sum(-1)
    if stages.shape is None:
        _settle_heads(state, chosen)
    state.note_size(state.capacity, state.over_budget or chosen.over_budget)
    if state.plan.scores_stay:
        state.observers.kept.set(chosen.scores)
    _note_error(state, observation, chosen.slots)
    if state.applies(chosen):
        _note_surplus(state, kept, counts)
        differ = stages.heads is not None or counts.dim() > 1 or isinstance(stages.shape, int)
        one_set = isinstance(stages.shape, str)
        _keep(state, observation, chosen.slots, ragged=differ and not one_set)


def _settle_heads(state: LayerState, own: Chosen) -> None:
    """Settles the sizes of heads by what they keep by themselves, where rounds leave them fixed."""
    stages = state.plan.stages
    if stages.rounds and stages.rounds.sizes == "fixed" and stages.heads is not None:
        state.settle_heads((state.positions() >= 0).sum(-1), (own.slots >= 0).sum(-1))


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
        encode_all(state, observation)
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
    encode, store, hot = state.plan.stages.encode or Encode(), state.stored(), None
    _check_heads(state, observation)
    if encode.recalls:
        hot, slots = _gone_cold(state, slots)
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
    if hot is not None:
        state.ragged_store().warm(hot)
    state.observers.select(slots)


def _gone_cold(state: LayerState, slots: Tensor) -> tuple[Tensor, Tensor]:
    """A bool mask of those at `slots` among all entries, and the slots of all, both `[B, H, K]`.

    Rows that have ended stay as they are.
    """
    store, tokens = state.stored(), state.sequence.tokens()
    every, hot = alive(state.columns()), kept_mask(slots, store.length)
    if tokens is not None and isinstance(store, RaggedStore) and store.hot is not None:
        hot = torch.where(tokens[:, -1].view(-1, 1, 1), hot, store.hot)
    return pick(hot, every, False), every


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
