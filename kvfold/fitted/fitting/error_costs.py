# SPDX-License-Identifier: Apache-2.0
"""Costs of errors in cached keys and values: Fisher information about the tokens that follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvfold.errors import UnsupportedModel
from kvfold.hf.chat_template import PromptFrame, token_ids
from kvfold.hf.models import read_logits, read_tokens
from kvfold.hf.rotation import Rotation

FOLLOWING = 128  # the last tokens of a text, whose predictions are asked; at most a quarter of it
SAMPLES = 2  # tokens drawn from each of these predictions
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

    Errors of a head's entries that are independent of each other, with mean 0 and covariance S,
    raise the KL of what follows, summed over its tokens, by about tr(costs·S)/2. Entries are those
    of a text's beginning, without the first `sinks` and the last `NEAR`, as its end attends to
    them. Layers are those of `rotations`.

    Raises UnsupportedModel for a model without gradients, or whose dtype they exceed.
    """
    ids = token_ids(tokenizer, PromptFrame.of(tokenizer).before, text).to(model.device)
    following = min(FOLLOWING, ids.shape[1] // 4)
    read = ids.shape[1] - following
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        read_tokens(model, ids[:, :read], cache, None)
    layers: list[Any] = [cache.layers[layer] for layer in rotations]
    for layer in layers:
        layer.keys = layer.keys.detach().requires_grad_()
        layer.values = layer.values.detach().requires_grad_()
    cached: list[Tensor] = [each for layer in layers for each in (layer.keys, layer.values)]
    with torch.enable_grad():
        logits = read_logits(model, ids[:, read:], cache, None, following)
        likelihoods = logits[0].float().log_softmax(-1)
        _check_numbers(model, likelihoods)
        chances, draw = likelihoods.detach().exp().cpu(), torch.Generator().manual_seed(0)
        drawn = torch.multinomial(chances, SAMPLES, replacement=True, generator=draw)
        totals = likelihoods.gather(1, drawn.to(ids.device)).sum(0).unbind()
    found = []
    for number, total in enumerate(totals, 1):
        slopes = _slopes(model, total, cached, last=number == SAMPLES)
        found.append(_products(slopes, list(rotations.values()), slice(sinks, read - NEAR)))
    costs = torch.stack(found).mean(0)
    _check_numbers(model, costs)
    return costs


def _slopes(
    model: PreTrainedModel, total: Tensor, cached: list[Tensor], last: bool
) -> tuple[Tensor, ...]:
    """Gradients of `total` by what is `cached`."""
    try:
        return torch.autograd.grad(total, cached, retain_graph=not last)
    except RuntimeError as problem:
        if "grad" not in str(problem):
            raise
        raise UnsupportedModel(
            f"{type(model).__name__} gives no gradients of its cached keys and values ({problem}): "
            'save contexts of this model with codec="zstd"'
        ) from problem


def _check_numbers(model: PreTrainedModel, numbers: Tensor) -> None:
    if not bool((numbers < torch.inf).all()):
        raise UnsupportedModel(
            f"predictions of {type(model).__name__}, or their gradients, are no numbers in "
            f"{model.dtype}: load the model in bfloat16 or float32"
        )


def _products(slopes: tuple[Tensor, ...], rotations: list[Rotation], far: slice) -> Tensor:
    """Sums over entries `far` of slopes' outer products `[2, L, H, D, D]`, of keys before RoPE."""
    of_keys = []
    for slope, rotation in zip(slopes[::2], rotations, strict=True):
        back = -torch.arange(slope.shape[2], device=slope.device)[None]
        of_keys.append(rotation(slope.float(), back))
    rows = [slope[0, :, far].cpu().double() for slope in (*of_keys, *slopes[1::2])]
    both: Tensor = torch.stack([each.mT @ each for each in rows]).unflatten(0, (2, -1))
    return both
