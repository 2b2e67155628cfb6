# SPDX-License-Identifier: Apache-2.0
"""PyramidInfer: fewer tokens computed in every layer, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvfold
from tests.helpers.by_hand import (
    LAYERS,
    SHAPES,
    SINKS,
    ByHand,
    assert_holds,
    best,
    distinct_prompts,
    model_with,
    rows_of,
    rows_of_layer,
)


def going_on(rows: Tensor, tokens: int, part: float, least_context: int) -> list[int]:
    """Slots of a layer that the next one computes; rows `[Hq, n, n]`."""
    recent = int(tokens * 0.2)
    window = 1 + recent
    context = rows.shape[1] - window
    kept = int(context * part)
    if context <= min(least_context, tokens - window) or part >= 1:
        return list(range(rows.shape[1]))
    if kept <= min(least_context, tokens - window):
        return list(range(rows.shape[1]))
    weights = [1 + 0.2 * r / recent for r in range(window)]
    scores = [
        sum(w * float(rows[:, context + r, j].mean()) for r, w in enumerate(weights)) / window
        for j in range(context)
    ]
    scores[:SINKS] = [math.inf] * SINKS
    return sorted(best(scores, kept)) + list(range(context, rows.shape[1]))


@torch.no_grad()
def pyramidinfer(model: PreTrainedModel, ids: Tensor, least: float, least_context: int) -> ByHand:
    """The model's own parts, one layer after the other, with what is left of the hidden states."""
    out = ByHand(model)
    hidden, places = model.model.embed_tokens(ids), list(range(ids.shape[1]))
    for index, (block, layer) in enumerate(zip(model.model.layers, out.layers, strict=True)):
        attention = block.self_attn
        normed = block.input_layernorm(hidden)
        q, k, v = (
            project(normed)[0].unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cos, sin = model.model.rotary_emb(hidden, torch.tensor([places]))
        q, k = (x[0] for x in apply_rotary_pos_emb(q[None], k[None], cos, sin))
        seen = layer.attend(q, k, v, 0, attention.scaling, float("inf"))
        hidden = hidden + attention.o_proj(seen.transpose(0, 1).flatten(1))[None]
        hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        for head in layer.heads:
            head.positions = list(places)
        part = (1 - least) * (math.cos(math.pi * index / LAYERS) + 1) / 2 + least
        slots = going_on(rows_of_layer(layer), ids.shape[1], part, least_context)
        hidden, places = hidden[:, slots], [places[i] for i in slots]
    out.seen = ids.shape[1]
    return out


@SHAPES
@pytest.mark.parametrize(("least", "least_context"), [(0.3, 8), (0.9, 20)])
def test_pyramidinfer_computes_fewer_tokens_in_every_layer(least, least_context, heads, lengths):
    ids, mask = distinct_prompts(lengths)
    model = model_with(heads, "kvfold")
    cache = kvfold.CompressedCache(
        model, f"pyramidinfer:least={least},least_context={least_context}"
    )
    kvfold.generate(model, ids, cache=cache, attention_mask=mask, max_new_tokens=1, do_sample=False)
    expected = []
    for row in rows_of(ids, lengths):
        # The prompt's last token is read with the answer.
        one = pyramidinfer(model_with(heads, "truth"), row[:, :-1], least, least_context)
        expected.append(one(row[:, -1:]))
    kept = [len(layer.heads[0]) for layer in expected[0].layers]
    assert kept == sorted(kept, reverse=True) and kept[0] == 64 and kept[-1] < 62
    assert_holds(cache, expected)
