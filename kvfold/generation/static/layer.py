# SPDX-License-Identifier: Apache-2.0
"""One layer while a graph decodes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvfold.attention import handshake
from kvfold.cache.layer import CompressedLayer
from kvfold.hf.attention import logit_options
from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.single_query import attend_to_buffers
from kvfold.store.ragged_part import uncounted


class StaticLayer(CacheLayerMixin):
    """A cache layer inside a graph. Counts are tensors: numbers would be constants."""

    is_compileable = True
    is_sliding = False
    room: float = math.inf  # steps until it must be handed back and made anew

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the layer is made from a filled one."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Takes one entry per head `[B, H, 1, D]`; the next attention is this layer's."""
        handshake.expect(self)
        return self._take(key_states, value_states)

    def _take(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def attend(self, module: nn.Module, query: Tensor, options: dict[str, Any]) -> Tensor:
        """Attention output `[B, 1, Hq, Dv]` of `query [B, Hq, 1, D]` over all stored entries."""
        out = self._attend(query, logit_options(module, query, options))
        return out.transpose(1, 2).contiguous()

    def _attend(self, query: Tensor, options: LogitOptions) -> Tensor:
        raise NotImplementedError

    def between_steps(self) -> None:
        """Hook after each step, outside of the graph."""

    def hand_back(self, layer: CompressedLayer) -> None:
        """Brings the eager layer to the state that eager decoding would have left."""
        raise NotImplementedError

    def nbytes(self, counted: set[int]) -> int:
        """Bytes of all tensors, but for those whose address is in `counted`."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Smallest possible mask, as layers mask by themselves."""
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class StaticBuffers(StaticLayer):
    """Static buffers of a layer's dense store, with room for new tokens; the graph writes to them.

    keys `[B, H, T, D]` and values `[B, H, T, Dv]`, filled up to slot `used`; `evicted` is the
    number of columns that are in no slot.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, layer: CompressedLayer, room: int) -> None:
        super().__init__()
        store = layer.state.dense_store()
        self.room = room
        self.first = store.keys.shape[2]
        # A view would bring its base's shape into the graph.
        self.keys, self.values = (buffer.data for buffer in store.reserve(room))
        self.used = torch.tensor(self.first, device=store.keys.device)
        self.evicted = torch.tensor(layer.state.seen - self.first, device=store.keys.device)
        for buffer in (self.keys, self.values):
            torch._dynamo.maybe_mark_dynamic(buffer, 2)

    def _widened_bias(self, layer: CompressedLayer) -> Tensor | None:
        """The entries' bias `[B, H, …]`, 0 for those to come; None if no entry has one."""
        bias = layer.state.stored().bias
        if bias is None:
            return None
        wide = F.pad(bias, (0, self.keys.shape[2] - bias.shape[2]))
        torch._dynamo.maybe_mark_dynamic(wide, 2)
        return wide

    def _keep_in_place(self) -> None:
        """Marks all tensors as static for CUDA graphs, which else copy them at every step."""
        if self.keys.is_cuda:
            for tensor in self._held():
                # With a guard, as before torch 2.12, each new cache would compile anew.
                torch._dynamo.mark_static_address(tensor, guard=False)

    def _held(self) -> list[Tensor]:
        return [held for held in vars(self).values() if isinstance(held, Tensor)]

    def _take(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes one entry per head `[B, H, 1, D]` into the next slot."""
        slot = self.used.view(1)
        self.keys.index_copy_(2, slot, keys)
        self.values.index_copy_(2, slot, values)
        self.used.add_(1)
        return self.keys, self.values

    def hand_back(self, layer: CompressedLayer) -> None:
        used = int(self.used)
        layer.update(self.keys[:, :, self.first : used], self.values[:, :, self.first : used])
        layer.state.sequence.note_mask(layer.state.sequence.tokens())
        layer.leave_out_ended()
        layer.state.stored().crop(0)  # gives back unused room

    def nbytes(self, counted: set[int]) -> int:
        return uncounted(self._held(), counted)

    def get_seq_length(self) -> Tensor:  # type: ignore[override]
        """Columns of the logical sequence, as a tensor."""
        return self.used + self.evicted


class StaticDense(StaticBuffers):
    """Static buffers in which all entries stay; `visible [B, H, T]` is true at slots with one."""

    def __init__(self, layer: CompressedLayer, room: int) -> None:
        super().__init__(layer, room)
        self.visible = torch.zeros(self.keys.shape[:3], dtype=torch.bool, device=self.keys.device)
        self.visible[:, :, : self.first] = layer.state.columns() >= 0
        torch._dynamo.maybe_mark_dynamic(self.visible, 2)
        self.bias = self._widened_bias(layer)
        self._keep_in_place()

    def _take(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.visible.index_fill_(2, self.used.view(1), True)
        return super()._take(keys, values)

    def _attend(self, query: Tensor, options: LogitOptions) -> Tensor:
        return attend_to_buffers(query, self.keys, self.values, self.visible, self.bias, **options)
