# SPDX-License-Identifier: Apache-2.0
"""What errors in cached keys and values cost: Fisher information about the tokens that follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvfold.errors import UnsupportedModel
from kvfold.hf.chat_template import PromptFrame, token_ids
from kvfold.hf.models import read_tokens
from kvfold.hf.rotation import Rotation

FOLLOWING = 128  # the last tokens of a text, whose predictions are asked; at most a quarter of it
SAMPLES = 2  # continuations drawn from these predictions
NEAR = 16  # entries before them that count for nothing: a codec stores the newest ones exactly


@torch.inference_mode(False)
def error_costs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    rotations: Mapping[int, Rotation],
    sinks: int,
) -> Tensor:
    """Costs `[2, L, H, D, D]` of errors in keys before RoPE, and in values; float64.

    An error e of all of a head's entries raises the KL of what follows by about eᵀCe/2. Only what
    attends from afar counts: of a text's end to entries of its beginning, but the first `sinks`.
    Layers are those of `rotations`.

    Raises UnsupportedModel for a model without gradients.
    """
    ids = token_ids(tokenizer, PromptFrame.of(tokenizer).before, text).to(model.device)
    following = min(FOLLOWING, ids.shape[1] // 4)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        read_tokens(model, ids[:, :-following], cache, None)
    layers: list[Any] = [cache.layers[layer] for layer in rotations]
    for layer in layers:
        layer.keys = layer.keys.detach().requires_grad_()
        layer.values = layer.values.detach().requires_grad_()
    cached: list[Tensor] = [each for layer in layers for each in (layer.keys, layer.values)]
    try:
        slopes = _slopes(model, ids[:, -following:], cache, cached)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as problem:
        raise UnsupportedModel(
            f"{type(model).__name__} gives no gradients of its cached keys and values ({problem}): "
            'save contexts of this model with codec="zstd"'
        ) from problem
    of_rotations, read = list(rotations.values()), ids.shape[1] - following
    found = [_products(each, of_rotations, read, sinks) for each in slopes]
    return torch.stack(found).mean(0)


def _slopes(
    model: PreTrainedModel, ids: Tensor, cache: DynamicCache, cached: list[Tensor]
) -> list[tuple[Tensor, ...]]:
    """Gradients, by what is `cached`, of the log-likelihoods of continuations drawn at `ids`."""
    with torch.enable_grad():
        likelihoods = model(ids, past_key_values=cache).logits[0].float().log_softmax(-1)
        chances, draw = likelihoods.detach().exp().cpu(), torch.Generator().manual_seed(0)
        drawn = torch.multinomial(chances, SAMPLES, replacement=True, generator=draw)
        totals = likelihoods.gather(1, drawn.to(ids.device)).sum(0)
        return [torch.autograd.grad(total, cached, retain_graph=True) for total in totals]


def _products(
    slopes: tuple[Tensor, ...], rotations: list[Rotation], read: int, sinks: int
) -> Tensor:
    """Sums over entries of slopes' outer products `[2, L, H, D, D]`, of keys before RoPE."""
    of_keys = []
    for slope, rotation in zip(slopes[::2], rotations, strict=True):
        back = -torch.arange(read - slope.shape[2], read, device=slope.device)[None]
        of_keys.append(rotation(slope.float(), back))
    found = []
    for slope in (*of_keys, *slopes[1::2]):
        first = read - slope.shape[2]  # a sliding window has forgotten those before
        far = slope[0, :, max(sinks - first, 0) : max(slope.shape[2] - NEAR, 0)].double().cpu()
        found.append(far.mT @ far)
    both: Tensor = torch.stack(found).unflatten(0, (2, -1))
    return both
