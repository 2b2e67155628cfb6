# SPDX-License-Identifier: Apache-2.0
"""The full cache that all else is measured against: as fast as plain SDPA allows.

Keys and values lie in a buffer with room for the tokens to come, where transformers' own cache
copies everything at each token; and attention runs in the fastest form that this machine has.
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

from kvfold.bench.sdpa_variants import Kernels
from kvfold.hf.attention import disable, head_scale
from kvfold.hf.stock_layers import is_compressible, stock_layers
from kvfold.store.buffer import Growing

NAME = "kvfold_full"


def full_twin(model: PreTrainedModel, kernels: Kernels) -> PreTrainedModel:
    """The same weights in modules of their own, which attend with `kernels`."""
    made = twin(model)
    name = f"{NAME}_{kernels.prefill.layout}_{kernels.decode.layout}"
    AttentionInterface.register(name, partial(_attention, kernels))
    sdpa_mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    AttentionMaskInterface.register(name, sdpa_mask)
    made.set_attn_implementation(name)
    return made


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in modules and a configuration of their own, on stock attention."""
    shared = (*model.parameters(), *model.buffers())
    made = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    disable(made)
    return made


def _attention(
    kernels: Kernels,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls."""
    kernel = kernels.decode if query.shape[2] == 1 else kernels.prefill
    scale = head_scale(module, query, kwargs.get("scaling"))
    out = kernel.attend(query, key, value, attention_mask, scale)
    return out.transpose(1, 2).contiguous(), None


class RoomyLayer(CacheLayerMixin):
    """Keys and values of one layer, with room for `room` more tokens."""

    is_sliding = False

    def __init__(self, room: int) -> None:
        self.room = room
        self.is_initialized = False
        self.grown: tuple[Growing, Growing] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.grown = Growing(key_states, self.room), Growing(value_states, self.room)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores new entries `[B, H, S, D]`; returns all."""
        if self.grown is None:
            self.lazy_initialization(key_states, value_states)
            # What came is contiguous, the buffer's rows are not.
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
        """Bytes of what is stored, without the room."""
        return 0 if self.grown is None else sum(grown.nbytes()[0] for grown in self.grown)


def full_cache(model: PreTrainedModel, room: int) -> Cache:
    """An empty cache that keeps everything, with room for `room` tokens after the prompt."""
    stock = stock_layers(model)
    return Cache(layers=[RoomyLayer(room) if is_compressible(layer) else layer for layer in stock])
