# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a text, and what predictions of later tokens lose by errors in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.errors import UnsupportedModel
from kvfold.hf.models import caches_latents, text_config
from kvfold.hf.rotation import Rotation

LATER = 256  # last tokens of a text, at most half of it, whose predictions are looked at


@dataclass(frozen=True)
class LayerGradients:
    """Keys before RoPE and values of one layer, `[H, T, D]`, and gradients with respect to both.

    Gradients are of the log-likelihood of later tokens, drawn from what the model predicts: the
    mean of their squares is the diagonal of the Fisher information, twice the KL divergence by a
    unit error.
    """

    keys: Tensor
    values: Tensor
    key_gradients: Tensor
    value_gradients: Tensor


def gradients(model: PreTrainedModel, ids: Tensor, draws: torch.Generator) -> list[LayerGradients]:
    """The layers that can be compressed, after a text `ids [1, N]`, of which T tokens come first.

    Raises UnsupportedModel for a model whose cache holds latents, one for all heads, or whose keys
    cannot be rotated back.
    """
    rotations = _rotations(model)
    count = ids.shape[1] - min(LATER, ids.shape[1] // 2)
    cache = DynamicCache(config=text_config(model))
    with torch.no_grad():
        model(input_ids=ids[:, :count], past_key_values=cache, logits_to_keep=1)
    leaves = [leaf for pair in _leaves(cache, rotations) for leaf in pair]
    with torch.enable_grad():
        logits = model(input_ids=ids[:, count:], past_key_values=cache).logits[0].float()
        likelihoods = logits.log_softmax(-1)
        drawn = torch.multinomial(likelihoods.detach().exp().cpu(), 1, generator=draws)
        total = likelihoods.gather(-1, drawn.to(likelihoods.device)).sum()
        found = torch.autograd.grad(total, leaves)
    at = torch.arange(count, device=ids.device)[None]

    def turned_back(rotation: Rotation, keys: Tensor) -> Tensor:
        return rotation(keys.detach().float(), -at.to(keys.device))[0]

    layers = zip(rotations, leaves[::2], leaves[1::2], found[::2], found[1::2], strict=True)
    return [
        LayerGradients(
            turned_back(rotation, keys),
            values.detach()[0].float(),
            turned_back(rotation, of_keys),
            of_values[0].float(),
        )
        for rotation, keys, values, of_keys, of_values in layers
    ]


def _rotations(model: PreTrainedModel) -> list[Rotation]:
    if caches_latents(model):
        raise UnsupportedModel(
            f"{type(model).__name__} caches latents, one for all heads, and a basis is for heads"
        )
    found = [state.rotation for state in CompressedCache(model, "full").states]
    for rotation in found:
        rotation.check_reversible()
    return found


def _leaves(cache: DynamicCache, rotations: list[Rotation]) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of the layers of `rotations`, which the next forward has gradients for."""
    for rotation in rotations:
        layer: Any = cache.layers[rotation.layer]
        layer.keys = layer.keys.detach().requires_grad_()
        layer.values = layer.values.detach().requires_grad_()
        yield layer.keys, layer.values
