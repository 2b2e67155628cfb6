# SPDX-License-Identifier: Apache-2.0
"""Layer-wise prefill: one layer at a time, on fewer and fewer tokens (PyramidInfer)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.errors import KvfoldError
from kvfold.hf.decoder_layers import DecoderLayers
from kvfold.kernels.gather import pick
from kvfold.methods.base import Method


def check_whole(method: Method, chunk: int, tokens: int) -> None:
    """Raises KvfoldError if a first prompt of `tokens` cannot be read in pieces of `chunk`."""
    if method.stages().token_pruning is not None and chunk < tokens:
        raise KvfoldError(f"{method} reads a prompt in one piece: leave out the chunk")


@torch.no_grad()
def read_layerwise(
    model: PreTrainedModel,
    cache: CompressedCache,
    input_ids: Tensor,
    mask: Tensor | None,
    chunk: int,
) -> None:
    """Fills a new cache with the prompt `input_ids [B, N]`; `mask [B, ≥ N]` is 0 at padding.

    After each layer the method's token pruning chooses the tokens of the next one. Raises
    KvfoldError as `check_whole`.
    """
    check_whole(cache.method, chunk, input_ids.shape[1])
    token_pruning = cache.method.stages().token_pruning
    assert token_pruning is not None
    layers = DecoderLayers(model)
    mask = torch.ones_like(input_ids) if mask is None else mask[:, : input_ids.shape[1]]
    hidden = layers.embed(input_ids)
    columns = torch.arange(input_ids.shape[1], device=mask.device).expand_as(mask)
    columns = columns.masked_fill(mask == 0, -1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with cache.phase.layer_by_layer():
        for index, layer in enumerate(cache.compressed_layers):
            at = positions.gather(1, columns.clamp(min=0))
            hidden = layers.run(index, hidden, columns >= 0, at, cache)
            observation = cache.phase.observed
            assert observation is not None
            layer.adopt(columns.to(layer.device), mask.bool().to(layer.device))
            slots = token_pruning(replace(observation, tokens_seen=mask.sum(-1)))
            wide = slots.clamp(min=0)[..., None].expand(-1, -1, hidden.shape[-1])
            hidden = hidden.gather(1, wide)
            columns = pick(columns, slots.to(columns.device), -1)
    cache.phase.note_ids(input_ids)
    cache.phase.compact()
