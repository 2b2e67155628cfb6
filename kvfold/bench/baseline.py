# SPDX-License-Identifier: Apache-2.0
"""Baseline: a full cache that is as fast as plain SDPA allows.

Keys and values are stored in a preallocated buffer, where transformers' DynamicCache copies the
whole cache at every token. Attention uses the SDPA variant that is fastest on this machine.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from kvfold.bench.sdpa_variants import SdpaChoice
from kvfold.hf.attention import disable, logit_options
from kvfold.hf.stock_layers import is_compressible, stock_layers
from kvfold.store.buffer import GrowingBuffer

NAME = "kvfold_full"


def full_twin(model: PreTrainedModel, kernels: SdpaChoice) -> PreTrainedModel:
    """A copy of the modules that shares the weights and attends with `kernels`."""
    made = twin(model)
    name = f"{NAME}_{kernels.prefill.layout}_{kernels.decode.layout}"
    AttentionInterface.register(name, partial(_attention, kernels))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    made.set_attn_implementation(name)
    return made


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of modules and configuration that shares the weights, on stock attention."""
    shared = (*model.parameters(), *model.buffers())
    made = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    disable(made)
    return made


def _attention(
    kernels: SdpaChoice,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function registered with transformers.

    Query `[B, Hq, S, D]`, key and value `[B, H, T, D]`; returns `[B, S, Hq, D]` and no weights.
    """
    kernel = kernels.decode if query.shape[2] == 1 else kernels.prefill
    scale = logit_options(module, query, kwargs)["scale"]
    out = kernel.attend(query, key, value, attention_mask, scale)
    return out.transpose(1, 2).contiguous(), None


class RoomyLayer(CacheLayerMixin):
    """One layer's keys and values `[B, H, T, D]` in buffers with `room` more tokens allocated."""

    is_sliding = False

    def __init__(self, room: int) -> None:
        self.room = room
        self.is_initialized = False
        self.grown: tuple[GrowingBuffer, GrowingBuffer] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.grown = GrowingBuffer(key_states, self.room), GrowingBuffer(value_states, self.room)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values `[B, H, S, D]`; returns all of them, `[B, H, T, D]`."""
        if self.grown is None:
            self.lazy_initialization(key_states, value_states)
            # The inputs are contiguous; views of the buffer are not.
            return key_states, value_states
        for grown, states in zip(self.grown, (key_states, value_states), strict=True):
            grown.append(states)
        return self.grown[0].rows, self.grown[1].rows

    def get_seq_length(self) -> int:
        return 0 if self.grown is None else self.grown[0].length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def nbytes(self) -> int:
        """Bytes of the stored entries, without the preallocated room."""
        return 0 if self.grown is None else sum(grown.nbytes()[0] for grown in self.grown)


def full_cache(model: PreTrainedModel, room: int) -> Cache:
    """An empty full cache that preallocates `room` tokens after the prompt.

    Layers that kvfold cannot compress (sliding window, linear attention) keep their stock class.
    """
    stock = stock_layers(model)
    return Cache(layers=[RoomyLayer(room) if is_compressible(layer) else layer for layer in stock])
