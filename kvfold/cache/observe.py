# SPDX-License-Identifier: Apache-2.0
"""Observations: attention calls → a layer's running statistics → `Observation` for the method."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.attention.call import AttentionCall
from kvfold.cache.references import add_references
from kvfold.cache.state import OF_PREFILLS, LayerState
from kvfold.cache.surprise import Surprise
from kvfold.errors import UnsupportedModel
from kvfold.kernels.gather import pick
from kvfold.kernels.query_moments import QueryMoments
from kvfold.methods.observation import Observation, ProjectedNorms, QueryMomentsNeed
from kvfold.methods.stages.score.learned import ScoredOnce


def add_moments(state: LayerState, sums: Tensor, squares: Tensor | None) -> None:
    """Adds the column sums `[B, H, T]` of one call, and their squares; overwrites `sums`."""
    state.evicted_at = state.seen
    state.sums = _added(state, sums, state.sums)
    if squares is not None:
        state.squares = _added(state, squares, state.squares)


def add_maxima(state: LayerState, maxima: Tensor) -> None:
    """Running maximum over calls; the repetition's own entries are left out (cropped later)."""
    assert state.phase.repeating is not None
    maxima = _per_stored_head(state, maxima)[..., : state.phase.repeating.text]
    old = state.reconstruction_scores
    state.reconstruction_scores = maxima.clone() if old is None else torch.maximum(old, maxima)


def note_piece(state: LayerState, call: AttentionCall) -> None:
    """Notes what the method reads of each piece of a prefill, window queries and sums aside."""
    add_query_moments(state, call)
    add_to_chunks(state, call)
    add_references(state, call)


def add_query_moments(state: LayerState, call: AttentionCall) -> None:
    """Adds the queries of a piece of a prefill, if the method reads their moments."""
    need, query = state.plan.stages.needs.query_moments, call.query
    if need is None or need.fitted is not None:
        return
    state.evicted_at = state.seen
    columns = torch.arange(state.seen - query.shape[2], state.seen, device=query.device)
    padded = state.sequence.valid is not None
    if not padded:  # the first tokens are the first columns
        skipped = max(0, need.skip - (state.seen - query.shape[2]))
        query, columns = query[:, :, skipped:], columns[skipped:]
    columns = state.sequence.real(columns.expand(len(query), 1, -1))
    positions = state.sequence.positions(columns)[:, 0]
    state.query_moments.add(query, positions, padded, state.rotation, need)


def add_answer_moments(state: LayerState, query: Tensor, columns: Tensor) -> None:
    """Adds the queries `[B, Hq, S, D]` generated since the last round, if the method reads them.

    `columns [B, S]` are theirs and those of older ones, −1 for padding.
    """
    need, stages = state.plan.stages.needs.query_moments, state.plan.stages
    if need is None or not need.running:
        return
    assert state.next_round is not None and state.turn_end is not None
    state.evicted_at = state.seen
    older = columns < max(state.turn_end, state.next_round - stages.every)
    columns = state.sequence.real(columns.masked_fill(older, -1)[:, None])
    positions = state.sequence.positions(columns)[:, 0]
    state.query_moments.add_answer(query, positions, state.rotation, need)


def add_to_chunks(state: LayerState, call: AttentionCall) -> None:
    """Adds a piece of a prefill, if the method reads attention inside chunks."""
    need, query = state.plan.stages.needs.chunk_sums, call.query
    if need is None:
        return
    state.evicted_at = state.seen
    new = query.shape[2]
    columns = torch.arange(state.seen - new, state.seen, device=query.device)
    columns = state.sequence.real(columns.expand(len(query), 1, -1))
    waits = state.sequence.positions(columns)[:, 0] >= need.first
    state.query_chunks.add(query, call.key[:, :, call.key.shape[2] - new :], waits)
    settle_chunks(state, end=False)


def settle_chunks(state: LayerState, end: bool) -> None:
    """Notes the sums of chunks that are complete; all are at the prefill's `end`."""
    need = state.plan.stages.needs.chunk_sums
    completed = None if need is None else state.query_chunks.complete(need, end)
    if completed is None:
        return
    sums, known = _per_stored_head(state, completed[0]), completed[1][:, None]
    whole = chunk_sums_of(state).clone()
    newest = whole[..., whole.shape[-1] - sums.shape[-1] :]
    newest.copy_(sums.where(known, newest))
    state.chunk_sums = whole


def chunk_sums_of(state: LayerState) -> Tensor:
    """Attention that the stored entries received in chunks `[B, H, T]`; 1 in none."""
    store = state.stored()
    sums, missing = state.chunk_sums, store.length
    if sums is None:
        return torch.ones(
            *store.keys.shape[:2], missing, dtype=torch.float32, device=store.keys.device
        )
    return F.pad(sums, (0, missing - sums.shape[-1]), value=OF_PREFILLS["chunk_sums"])


def previous_scores_of(state: LayerState) -> Tensor:
    """Scores of the stored entries at the last eviction `[B, H, T]`; 0 for those without one."""
    store, scores = state.stored(), state.scores
    if scores is None:
        return torch.zeros(store.columns.shape, dtype=torch.float32, device=store.keys.device)
    return F.pad(scores.nan_to_num(0), (0, store.length - scores.shape[-1]))


def observation_of(state: LayerState, call: AttentionCall) -> Observation:
    """Observation of the layer after `call`, with the window queries of its prefill."""
    if call.row is not None and state.plan.stages.needs.window <= 1:
        return observation_at(state, call, None)
    query, columns = state.query_window.joined(call, state.sequence)
    return observation_at(state, call._replace(query=query), columns)


def observation_at(
    state: LayerState, call: AttentionCall, query_columns: Tensor | None
) -> Observation:
    """Observation of the layer with the queries of `call`, at columns `query_columns [B, W]`."""
    store, positions, needs = state.stored(), state.positions(), state.plan.stages.needs
    moments = needs.query_moments
    expanded = call.key.shape[1] // store.keys.shape[1]
    keys, values = (call.key, call.value) if expanded > 1 else store.dense()

    def per_head(entries: Tensor | None) -> Tensor | None:
        if entries is None or expanded == 1:
            return entries
        return entries.repeat_interleave(expanded, 1)

    return Observation(
        keys,
        values,
        positions if expanded == 1 else positions.repeat_interleave(expanded, 1),
        call.query,
        None if query_columns is None else state.sequence.positions(query_columns),
        call.row,
        column_sums=per_head(state.sums),
        column_squares=per_head(state.squares),
        reconstruction_scores=per_head(state.reconstruction_scores),
        chunk_sums=per_head(chunk_sums_of(state)) if needs.chunk_sums else None,
        tokens_seen=state.seen_per_row(),
        layer=state.plan.layer,
        layers=state.plan.layers,
        seed=draw(state),
        **call.logits,
        token_ids=per_head(token_ids_of(state)) if needs.token_ids else None,
        key_positions=state.key_positions() if needs.unrotated else None,
        rotate=state.rotation if needs.rotated_back else None,
        norms_of_outputs=norms_of_outputs(state, call),
        query_moments=None if moments is None else query_moments_of(state, call.query, moments),
        scorer=_scorer_of(state),
        fitted_heads=state.fitted_heads,
        bias=per_head(store.bias),
        previous_scores=per_head(previous_scores_of(state)) if needs.previous_scores else None,
        surprise=per_head(surprise_of(state)) if needs.surprise else None,
        prompt_tokens=prompt_tokens_of(state) if needs.surprise else None,
        most_queries=needs.window,
    )


def query_moments_of(state: LayerState, query: Tensor, need: QueryMomentsNeed) -> QueryMoments:
    """Moments of the queries so far, shaped like `query [B, Hq, S, D]`; or those of a file."""
    fitted = state.fitted_moments
    if fitted is None:
        return state.query_moments.of(query, need)
    return fitted.index(lambda x: x.to(query.device).expand(len(query), *x.shape[1:]))


def norms_of_outputs(state: LayerState, call: AttentionCall) -> ProjectedNorms | None:
    """Norms of projected values, if the method reads them."""
    kind = state.plan.stages.needs.output_norms
    if kind is None:
        return None
    return partial(state.projection.norms, kind=kind, query_heads=call.query.shape[1])


def observation_of_stored(state: LayerState, unrotated: bool | None = None) -> Observation:
    """Observation of the entries that a layer stores, without queries and without a forward.

    Scores of entries alone (norms, fitted scorers) are those that a prefill would give them.
    `unrotated` asks for keys before RoPE; None: as the method does.
    """
    keys, values = state.stored().dense()
    unrotated = state.plan.stages.needs.unrotated if unrotated is None else unrotated
    return Observation(
        keys,
        values,
        state.positions(),
        tokens_seen=state.seen_per_row(),
        layer=state.plan.layer,
        layers=state.plan.layers,
        seed=draw(state),
        key_positions=state.key_positions() if unrotated else None,
        rotate=state.rotation if unrotated else None,
        scorer=_scorer_of(state),
    )


def _scorer_of(state: LayerState) -> ScoredOnce | None:
    return None if state.scorer is None else ScoredOnce(state.scorer)


def check_positions(state: LayerState, new: int, position_ids: Tensor | None) -> None:
    """Raises UnsupportedModel unless the model rotates its `new` tokens to their positions.

    `position_ids [B or 1, S]` are the model's.
    """
    if state.plan.layer > 0 or not state.rotation.turns:  # the same in all layers
        return
    store, sequence = state.stored(), state.sequence
    columns = torch.arange(state.seen - new, state.seen, device=store.keys.device)
    expected = sequence.positions(columns.expand(len(store.keys), -1))
    if position_ids is not None and position_ids.shape[1:] == columns.shape:
        tokens = sequence.tokens()
        differ = position_ids != expected
        if not bool((differ if tokens is None else differ & tokens[:, columns]).any()):
            return
    raise UnsupportedModel(
        "the model does not rotate each token to its number in its row, padding left out, so that "
        "there are no un-rotated keys or queries: leave position_ids out, or where rows are padded "
        "let them count from each row's first token, as kvfold.generate does"
    )


def token_ids_of(state: LayerState) -> Tensor:
    """Token ids of the stored entries `[B, H, T]`; −1 for padding, for holes, and where unknown."""
    columns = state.columns()
    ids = state.phase.ids(state.seen, columns.device)
    if ids is None:
        return torch.full_like(columns, -1)
    return pick(ids[:, None].expand(-1, columns.shape[1], -1), columns, -1)


def surprise_of(state: LayerState) -> Tensor:
    """−ln p of the stored entries' tokens `[B, H, T]`; 0 for padding, holes, and until it is known.

    Raises UnsupportedModel if tokens were read without their logits.
    """
    columns = state.columns()
    numbers = _surprise(state).of(state.seen).nan_to_num(0).to(columns.device)
    return pick(numbers[:, None].expand(-1, columns.shape[1], -1), columns, 0)


def prompt_tokens_of(state: LayerState) -> Tensor:
    """Tokens `[B]` of the prompt that has just ended; 0 if none has."""
    rows, device = len(state.stored().keys), state.stored().keys.device
    return _surprise(state).prompt_tokens(state.sequence.tokens(), state.seen, rows).to(device)


def judged(state: LayerState, observation: Observation) -> Observation:
    """The observation of a forward that has returned, whose logits were not known inside it."""
    expanded = observation.keys.shape[1] // state.stored().keys.shape[1]
    return replace(observation, surprise=surprise_of(state).repeat_interleave(expanded, 1))


def _surprise(state: LayerState) -> Surprise:
    known = state.phase.incoming_surprise or state.phase.surprise
    assert known is not None
    return known


def draw(state: LayerState) -> int:
    """Seed of this eviction's random draws."""
    return hash((state.plan.seed, state.plan.layer, state.rounds)) % 2**31


def _added(state: LayerState, new: Tensor, old: Tensor | None) -> Tensor:
    new = _per_stored_head(state, new)
    if old is not None:
        new[..., : old.shape[-1]].add_(old)
    return new


def _per_stored_head(state: LayerState, scores: Tensor) -> Tensor:
    """Mean over the KV heads that share one stored head (several for expanded)."""
    heads = state.stored().keys.shape[1]
    return scores if scores.shape[1] == heads else scores.unflatten(1, (heads, -1)).mean(2)
