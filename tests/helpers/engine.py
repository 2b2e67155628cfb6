# SPDX-License-Identifier: Apache-2.0
"""A prompt's keys, values and queries after RoPE, as an engine would hold them."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvfold.policies import Policy, Prefill, Rope


@torch.no_grad()
def recorded(model: PreTrainedModel, ids: Tensor) -> Prefill:
    """All that policies can ask for, of a prompt `ids [1, T]` that the stock model reads."""
    file: Any = sys.modules[type(model).__module__]
    rotate = file.apply_rotary_pos_emb
    queries: list[Tensor] = []
    stock: Any = model.model

    def noted(*args: Any, **options: Any) -> Any:
        turned = rotate(*args, **options)
        queries.append(turned[0][0])
        return turned

    cache: Any = DynamicCache(config=model.config)
    with patch.object(file, "apply_rotary_pos_emb", noted):
        model(ids, past_key_values=cache)
    return Prefill(
        [layer.keys[0] for layer in cache.layers],
        [layer.values[0] for layer in cache.layers],
        queries,
        rope=Rope(stock.rotary_emb.inv_freq),
        token_ids=ids[0],
        output_weights=[layer.self_attn.o_proj.weight for layer in stock.layers],
        scale=stock.layers[0].self_attn.scaling,
    )


def least(policy: Policy, whole: Prefill) -> Prefill:
    """The tensors that a policy says it needs, and no others."""
    needs, count = policy.needs, policy.needs.queries
    last = slice(None) if count == "all" else slice(max(0, whole.tokens - count), None)
    return Prefill(
        whole.keys,
        whole.values,
        None if count == 0 else [queries[:, last] for queries in whole.queries or ()],
        rope=whole.rope if needs.rope else None,
        token_ids=whole.token_ids if needs.token_ids else None,
        output_weights=whole.output_weights if needs.output_weights else None,
        scale=whole.scale,
    )
