# SPDX-License-Identifier: Apache-2.0
"""Refits of kept entries to reference queries: of a prefill's tokens, or of their repetition.

A token's own query did not see what follows it. Rotated on by the text's length, as if the text
stood there once more, it sees the whole text, and before it the tokens that preceded it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.cache.phase import ReconstructionForward
from kvfold.cache.state import LayerState
from kvfold.errors import UnsupportedModel
from kvfold.kernels.column_maxima import NotedPart, pick_queries
from kvfold.kernels.gather import take
from kvfold.kernels.partial_attention import PartOutput, attend_to_part, joined_parts
from kvfold.methods.observation import Observation
from kvfold.methods.stages.refit.base import Compaction
from kvfold.observers.call import AttentionCall
from kvfold.observers.references import (
    References,
    ReferencesNeed,
    evenly,
    left_padded,
    most_tokens,
    repeats_references,
)

TOGETHER = 128  # tokens whose queries look at their own part together
HIDDEN = 2**62  # column of entries that a part does not show


def attention_to_text(
    state: LayerState, call: AttentionCall, repeating: ReconstructionForward
) -> NotedPart | None:
    """The text's entries, whose attention is wanted for a forward's references; None without any.

    The text is behind its opening and its padding. A share far below that of all else is rounded,
    so that there is none where all references count alike.
    """
    chosen, need = _chosen(state, call, repeating), state.needs.get(ReferencesNeed)
    if chosen is None or need is None or not need.by_share:
        return None
    before = state.positions()[:, 0, : repeating.text] < state.protected()[:, None]
    return NotedPart([slice(first, repeating.text) for first in before.sum(-1).tolist()], chosen)


def add_repeated(
    state: LayerState,
    call: AttentionCall,
    repeating: ReconstructionForward,
    counted: Tensor | None,
    text: NotedPart | None = None,
    out: Tensor | None = None,
) -> None:
    """Adds queries of a forward that repeats a part of the text; `counted [B, S]`, None: all.

    With `text`, what attention to it was, where `out [B, S, Hq, Dv]` is all, nothing is computed.
    """
    chosen, new = _chosen(state, call, repeating), call.query.shape[2]
    if chosen is None:
        return
    rows, heads = call.key.shape[:2]
    groups = call.query.shape[1] // heads
    queries = _by_token(pick_queries(call.query, chosen), heads)
    real = torch.ones(rows, new, dtype=torch.bool, device=chosen.device)
    real = real if counted is None else counted
    block = None
    if text is not None and text.filled and out is not None:
        block, rest = text.of_rows(out.transpose(1, 2))
    else:
        own = _own(call, queries, chosen, real)
        observation = Observation(call.key, call.value, state.positions(), **call.logits)
        rest = joined_parts([own, *_beside(state, observation, queries)])
    real = (chosen >= 0).repeat_interleave(groups, 1)
    state.observers[ReferencesNeed].repeated.append(References(queries, rest, real, groups, block))


def _chosen(
    state: LayerState, call: AttentionCall, repeating: ReconstructionForward
) -> Tensor | None:
    """The tokens `[B, n]` of a forward whose queries are references; None if none are.

    They are chosen for each row as if it were alone, ascending; −1 comes first, where a row has
    fewer.
    """
    need, new = state.needs.get(ReferencesNeed), call.query.shape[2]
    if need is None or not repeats_references(state.needs):
        return None
    if need.on_policy == (repeating.scored is not None):
        return None
    most, of_rows = most_tokens(need, call.query.shape[1], call.key), []
    for own, total in zip(repeating.tokens, repeating.totals, strict=True):
        few = max(1, most * own // total)
        of_rows.append(new - own + evenly(own, few, call.query.device))
    return left_padded(of_rows, -1)


def _own(call: AttentionCall, queries: Tensor, chosen: Tensor, real: Tensor) -> PartOutput:
    """Attention of `queries [B, H, n, D]`, of the newest tokens `chosen`, to these tokens.

    A query sees none behind its own, so that a few queries at a time take half of the products.
    """
    new, groups = real.shape[1], queries.shape[2] // chosen.shape[1]
    columns = torch.arange(new, device=chosen.device).masked_fill(~real, HIDDEN)[:, None]
    parts = []
    for few, tokens in zip(
        queries.split(TOGETHER * groups, 2), chosen.split(TOGETHER, 1), strict=True
    ):
        end = max(int(tokens.max()), 0) + 1
        keys, values = (each[:, :, -new:][:, :, :end] for each in (call.key, call.value))
        part = attend_to_part(
            few,
            keys,
            values,
            columns=columns[..., :end],
            until=tokens.repeat_interleave(groups, 1)[:, None],
            scale=call.logits["scale"],
            softcap=call.logits.get("softcap"),
        )
        parts.append(part)
    outs, masses = zip(*parts, strict=True)
    return PartOutput(torch.cat(outs, 2), torch.cat(masses, 2))


def refitted(
    state: LayerState, observation: Observation, slots: Tensor
) -> tuple[list[Tensor], Tensor | None] | None:
    """Keys `[B, H, K, D]` and new values of the entries at `slots [B, H, K]`, and their bias.

    None where the method refits nothing, or no reference queries were kept. Raises UnsupportedModel
    for latents.
    """
    refit, store = state.plan.stages.refit, state.stored()
    if refit is None or store.encoded:
        return None
    if observation.keys.shape[1] != store.keys.shape[1]:
        raise UnsupportedModel(
            "this model's cache holds latents, of which keys and values are made together: leave "
            "match out"
        )
    if state.phase.before_refit is not None:
        state.phase.before_refit(state.plan.layer)
    references = _references_of(state, observation)
    if references is None:
        return None
    keys, values = store.dense()
    block = state.positions() >= state.protected().view(-1, 1, 1)
    scale, softcap = observation.scale, observation.softcap
    made = refit(Compaction(keys, values, store.bias, block, slots, references, scale, softcap))
    state.report("refit", made.report)
    return [take(keys, slots), made.values], made.bias


def _references_of(state: LayerState, observation: Observation) -> References | None:
    """The references that were kept, or made of the queries that were; None without any."""
    held = state.observers.get(ReferencesNeed)
    if held is None:
        return None
    if held.repeated:
        return References.joined(held.repeated)
    if not held.query_heads:
        return None
    heads, first_tokens = observation.keys.shape[1], state.protected().view(-1, 1, 1)
    query, columns = held.joined(most_tokens(held.need, held.query_heads, observation.keys))
    groups, at = query.shape[1] // heads, columns[:, None]
    entries, positions = state.columns(), state.positions()
    own = (entries >= held.first) & (positions >= first_tokens)
    part = attend_to_part(
        _by_token(query, heads),
        observation.keys,
        observation.values,
        columns=entries.masked_fill(~own, HIDDEN),
        until=at.repeat_interleave(groups, -1),
        scale=observation.scale,
        softcap=observation.softcap,
    )
    moved = _by_token(state.plan.rotation(query, own.sum(-1)[:, 0]), heads)
    rest = joined_parts([part, *_beside(state, observation, moved)])
    real = (state.sequence.positions(at) >= first_tokens)[:, 0].repeat_interleave(groups, 1)
    return References(moved, rest, real, groups)


def _beside(state: LayerState, observation: Observation, queries: Tensor) -> list[PartOutput]:
    """Attention of `queries [B, H, n, D]` beside the text: to its opening, and to sink logits."""
    positions, sink_logits, parts = observation.positions, observation.sink_logits, []
    opening = (positions >= 0) & (positions < state.protected().view(-1, 1, 1))
    if bool(opening.any()):
        end = int(opening.any(0).any(0).nonzero()[-1]) + 1
        hidden = torch.zeros_like(positions[..., :end]).masked_fill(~opening[..., :end], HIDDEN)
        part = attend_to_part(
            queries,
            observation.keys[:, :, :end],
            observation.values[:, :, :end],
            columns=hidden,
            until=hidden.new_zeros(1, 1, queries.shape[2]),
            scale=observation.scale,
            softcap=observation.softcap,
        )
        parts.append(part)
    if sink_logits is not None:
        by_head = sink_logits.to(queries.dtype).view(queries.shape[1], 1, -1)
        tokens = queries.shape[2] // by_head.shape[2]
        mass = by_head.expand(-1, tokens, -1).flatten(1).expand(len(queries), -1, -1)
        nothing = queries.new_zeros(*queries.shape[:3], observation.values.shape[-1])
        parts.append(PartOutput(nothing, mass))
    return parts


def _by_token(query: Tensor, heads: int) -> Tensor:
    """Queries `[B, Hq, n, D]` as `[B, H, n·G, D]`, token by token, at least float32."""
    wide = query.to(torch.promote_types(query.dtype, torch.float32))
    return wide.unflatten(1, (heads, -1)).transpose(2, 3).flatten(2, 3)
