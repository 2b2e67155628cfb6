# SPDX-License-Identifier: Apache-2.0
"""Rounds: a layer is brought back to its size after every n generated tokens (`Rounds`).

Between two rounds tokens are appended. A round comes after the attention of its step, so that the
step itself has attended to all entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.cache.evict import evict
from kvfold.cache.observe import observation_at, observation_of
from kvfold.cache.prefill import bring_to_budget
from kvfold.cache.sizes import open_rows, size_of, sized_together
from kvfold.cache.state import LayerState
from kvfold.methods.base import Across, Measured
from kvfold.methods.observation import Observation
from kvfold.methods.stages.when import Rounds
from kvfold.observers.call import AttentionCall
from kvfold.observers.query_moments import QueryMomentsNeed


def note_token(state: LayerState, call: AttentionCall) -> None:
    """Keeps the query of a generated token if the next round needs it, and evicts if that is due.

    Raises KvfoldError for scores that cannot be ranked.
    """
    if state.next_round is None:
        _begin(state, call)
        return
    seen, window = state.sequence.seen, state.observers.window.answer
    left = state.next_round - seen
    if left < window.width:
        window.add_step(call.query, seen - 1)
    if left <= 0:
        evict_round(state, call)
        state.end_round(left)
        if _rounds(state).every >= window.width:
            window.clear()


def _rounds(state: LayerState) -> Rounds:
    rounds = state.plan.stages.rounds
    assert rounds is not None
    return rounds


def _begin(state: LayerState, call: AttentionCall) -> None:
    """Takes a single token that came first for the prompt."""
    budget = state.plan.budget
    observation = observation_of(state, call)
    state.begin_rounds(observation)
    allocate = state.plan.stages.allocate
    if isinstance(allocate, Across) and allocate.per_head:
        bring_to_budget(state, observation)
    elif budget is not None and budget.kind != "ratio":
        state.note_size(size_of(state, observation))


def evict_round(state: LayerState, call: AttentionCall) -> None:
    """Brings every row and head back to its capacity, by the scores of all stored entries.

    A method without a budget may measure how many that are.
    """
    allocate = state.plan.stages.allocate
    measured = isinstance(allocate, Measured) and allocate.in_rounds
    counts, sizes = (None, None) if measured else _sizes(state)
    if counts is None and not measured:
        return
    state.begin_eviction()
    observation = _observed(state, call)
    if counts is None:
        counts = size_of(state, observation)
    if counts.dim() > 1 and bool((counts < 0).any()):
        _size_and_evict(state, observation)
    else:
        _evict_running(state, observation, counts, sizes)


def _observed(state: LayerState, call: AttentionCall) -> Observation:
    """Observation by the answer's last queries, if the method reads any."""
    window = state.observers.window.answer
    if not window.width:
        return observation_of(state, call)
    query, columns = window.joined()
    moments = state.observers.get(QueryMomentsNeed)
    if moments is not None:
        assert state.next_round is not None and state.turn_end is not None
        first = max(state.turn_end, state.next_round - _rounds(state).every)
        moments.add_answer(state, query, columns, first)
    return observation_at(state, call._replace(query=query), columns)


def _size_and_evict(state: LayerState, observation: Observation) -> None:
    """Sizes the heads of rows that kept everything so far, and evicts; the last layer does for all.

    A row that still keeps everything is sized in a later round.
    """
    sized = sized_together(state, observation, _prompt_tokens(state), _beside(state))
    open_ = open_rows(sized)
    for each, of_layer, counts in sized:
        assert each.head_sizes is not None
        unsized = each.head_sizes < 0
        counts = torch.where(unsized, counts + each.protected()[:, None], each.head_sizes)
        each.note_head_sizes(counts, unsized & open_.to(counts.device))
        _evict_running(each, of_layer, counts)


def _evict_running(
    state: LayerState, observation: Observation, counts: Tensor, sizes: Tensor | None = None
) -> None:
    """As `evict`, but a row that has ended stays as it is, as it would be alone."""
    tokens = state.sequence.tokens()
    if tokens is not None:
        ended = ~tokens[:, -1]
        stored = (state.columns() >= 0).sum(-1).amax(-1)
        per_row = [-1] + [1] * (counts.dim() - 1)
        counts = torch.where(ended.view(per_row), stored.view(per_row), counts)
        sizes = None if sizes is None else sizes.masked_fill(ended[:, None], -1)
    evict(state, observation, counts, sizes, _beside(state))


def _prompt_tokens(state: LayerState) -> Tensor:
    """Tokens `[B]` that each row had when the last turn ended, without protected ones."""
    tokens, end = state.sequence.tokens(), state.turn_end
    if tokens is None:
        return torch.full_like(state.seen_per_row(), end or 0) - state.protected()
    return tokens[:, :end].sum(-1) - state.protected()


def _sizes(state: LayerState) -> tuple[Tensor | None, Tensor | None]:
    """Entries to keep, `[B]` or `[B, H]`, and the sizes `[B, H]` that replace those of `heads`.

    Without `heads`, sizes of heads are the entries to keep, −1 where they have none yet. None:
    nothing is evicted.
    """
    if state.plan.stages.heads is None and state.head_sizes is not None:
        return state.head_sizes, None
    again = _rounds(state).sizes == "again"
    return state.capacity, None if again else state.head_sizes


def _beside(state: LayerState) -> Tensor | None:
    """Bool mask `[B, H, T]` of the entries that do not count in the size; None: all count."""
    if not state.plan.stages.keeps_prompt:
        return None
    columns, end = state.columns(), state.turn_end
    assert end is not None
    return (columns >= 0) & (columns < end)
