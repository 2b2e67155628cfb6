# SPDX-License-Identifier: Apache-2.0
"""Models some of whose layers slide: kept entries of the full ones by loops, the others untouched.

For `REAL=gemma3`; skipped where no layer slides. Written out in float64, the sliding window's mask
included.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import CompressedCache
from tests.helpers.truth import Reader, stock_cache

pytestmark = pytest.mark.real

TOKENS, BUDGET, WINDOW = 640, 160, 8


@pytest.fixture(scope="module")
def full_layers(model: Any) -> list[int]:
    kinds = getattr(model.config, "layer_types", None) or []
    if "sliding_attention" not in kinds:
        pytest.skip("no layer of this model slides")
    return [at for at, kind in enumerate(kinds) if kind == "full_attention"]


def rows(module: Any, query: Tensor, key: Tensor) -> Tensor:
    """Causal attention `[H, G, S, T]` in float64 of queries `[Hq, S, D]`, of the newest tokens."""
    heads, tokens, size = key.shape
    grouped = query.view(heads, -1, query.shape[1], size)
    logits = grouped @ key[:, None].mT * module.scaling
    new = query.shape[1]
    seen = torch.arange(tokens) <= torch.arange(tokens - new, tokens)[:, None]
    return logits.masked_fill(~seen, -torch.inf).softmax(-1)


@pytest.fixture(scope="module")
def attention(exact: Any, ids: Tensor, full_layers: list[int]) -> dict[int, Tensor]:
    """Each full layer's attention over the text `[H, G, S, T]`, from transformers' own cache."""
    from transformers.models.gemma3.modeling_gemma3 import apply_rotary_pos_emb

    found: dict[int, Tensor] = {}
    hooks = []
    cache = stock_cache(exact)

    def note(module: Any, _: Any, given: dict[str, Any], __: Any) -> None:
        hidden, (cos, sin) = given["hidden_states"], given["position_embeddings"]
        query = module.q_norm(
            module.q_proj(hidden).view(*hidden.shape[:2], -1, module.head_dim)
        ).transpose(1, 2)
        query, _ = apply_rotary_pos_emb(query, query, cos, sin)
        found[module.layer_idx] = rows(module, query[0], cache.layers[module.layer_idx].keys[0])

    for layer in full_layers:
        module = exact.model.layers[layer].self_attn
        hooks.append(module.register_forward_hook(note, with_kwargs=True))
    Reader(exact, cache)(ids[:, :TOKENS])
    for hook in hooks:
        hook.remove()
    return found


def test_snapkv_keeps_what_the_window_votes_for(exact, ids, attention):
    cache = CompressedCache(exact, f"snapkv:window={WINDOW}", BUDGET)
    Reader(exact, cache)(ids[:, :TOKENS])
    for at, (layer, weights) in enumerate(attention.items()):
        votes = weights[:, :, -WINDOW:, :-WINDOW].mean((1, 2))
        for found, row in zip(cache.positions(at)[0], votes.tolist(), strict=True):
            near = [max(row[max(0, i - 3) : i + 4]) for i in range(len(row))]
            order = sorted(range(len(near)), key=lambda i: (-near[i], i))[: BUDGET - WINDOW]
            assert found.tolist() == sorted([*order, *range(TOKENS - WINDOW, TOKENS)]), layer


@pytest.mark.parametrize("spec", ["snapkv"])
def test_sliding_layers_are_transformers_own(exact, tokenizer, ids, full_layers, spec):
    """Their entries are those of transformers' cache, bit for bit, and outside the bytes told."""
    stock = stock_cache(exact)
    Reader(exact, stock)(ids[:, :TOKENS])
    cache = CompressedCache(exact, spec, 0.3, tokenizer=tokenizer)
    kvfold.generate(exact, ids[:, :TOKENS], cache=cache, max_new_tokens=1, do_sample=False)
    stats = cache.stats()
    layers = exact.config.num_hidden_layers
    assert sorted(stats.other_layers) == [at for at in range(layers) if at not in full_layers]
    assert len(stats.kept) == len(full_layers)
    for at in stats.other_layers:
        theirs = stock.layers[at]
        held = cache.layers[at]
        assert torch.equal(held.keys, theirs.keys) and torch.equal(held.values, theirs.values)
        assert held.keys.shape[2] < TOKENS
    full = stock_cache(exact)
    Reader(exact, full)(ids[:, :TOKENS])
    whole = sum(2 * full.layers[at].keys.nbytes for at in full_layers)
    assert stats.nbytes_full == whole and stats.nbytes < 0.4 * whole
