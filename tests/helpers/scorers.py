# SPDX-License-Identifier: Apache-2.0
"""Random scorers for random models, and what they score by hand in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.fitted.of_model import write_fitted
from kvfold.methods.stages.score.learned import Scorer


def random_scorer(model: Any, projections: int = 5, seed: int = 0) -> Scorer:
    """A scorer whose scores are spread as those of trained ones."""
    config = model.config
    heads, layers = config.num_key_value_heads, config.num_hidden_layers
    size = 2 * (config.hidden_size // config.num_attention_heads) + 3
    draw = torch.Generator().manual_seed(seed)
    weights = torch.randn(layers, heads, size + projections, generator=draw)
    scales = torch.rand(layers, heads, size, generator=draw) + 0.5
    return Scorer(weights, scales, torch.randn(size, projections, generator=draw) / size**0.5)


def zap_of(model: Any, folder: Path, options: str = "", **how: Any) -> str:
    """The text of zap with a random scorer of the model, written into `folder`."""
    path = folder / "scorer.safetensors"
    write_fitted(path, random_scorer(model, **how), model, written_by="", target="kvzip", texts=0)
    return f"zap:file={path}{options}"


@torch.no_grad()
def scores_by_hand(model: Any, ids: Tensor, mask: Tensor, scorer: Scorer) -> Tensor:
    """Scores `[L, B, H, N]`, float64, −∞ at padding, from the model's own full cache."""
    at = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = model(ids, attention_mask=mask, position_ids=at, use_cache=True).past_key_values
    layers = []
    for index, layer in enumerate(cache.layers):
        keys, values = _before_rope(model, layer.keys.double(), at), layer.values.double()
        scores = linear_scores(keys, values, scorer, index)
        layers.append(scores.masked_fill(mask[:, None] == 0, -torch.inf))
    return torch.stack(layers)


def linear_scores(keys: Tensor, values: Tensor, scorer: Scorer, index: int) -> Tensor:
    """Scores `[B, H, T]` of a layer's keys before RoPE and values `[B, H, T, D]`, float64."""
    norms = [x.pow(2).sum(-1, keepdim=True).sqrt() for x in (keys, values)]
    x = torch.cat([keys, values, *norms, torch.ones_like(norms[0])], -1)
    x = x / scorer.scales[index, :, None].double()
    x = torch.cat([x, torch.tanh(x @ scorer.projections.double())], -1)
    return torch.einsum("bhtf,hf->bht", x, scorer.weights[index].double())


def _before_rope(model: Any, keys: Tensor, at: Tensor) -> Tensor:
    frequencies = model.get_decoder().rotary_emb.inv_freq.double()
    angles = (at[:, None, :, None] * frequencies).repeat(1, 1, 1, 2)
    first, second = keys.chunk(2, -1)
    return keys * angles.cos() - torch.cat([-second, first], -1) * angles.sin()


def pooled_by_hand(
    scores: Tensor, mask: Tensor, size: int, sinks: int, window: int, least: int = 0
) -> list[list[list[Any]]]:
    """Kept columns `[B][L][H]` of the best `size` per head on average, one pool for each row.

    The best `least` of each head are kept in any case.
    """
    layers, batch, heads, columns = scores.shape
    at = mask.cumsum(-1) - 1
    kept = []
    for row in range(batch):
        forced = ((at[row] < sinks) | (at[row] > at[row].max() - window)) & (mask[row] > 0)
        of_row = scores[:, row].masked_fill(forced, torch.inf)
        for head in of_row.flatten(0, 1):
            head[head.argsort(descending=True, stable=True)[:least]] = torch.inf
        of_row = of_row.flatten()
        best = of_row.argsort(descending=True, stable=True)[: size * layers * heads]
        chosen = torch.zeros_like(of_row, dtype=torch.bool)
        chosen[best] = True
        chosen = chosen.view(layers, heads, columns)
        kept.append([[head.nonzero().flatten().tolist() for head in layer] for layer in chosen])
    return kept
