# SPDX-License-Identifier: Apache-2.0
"""One layer while a compiled graph decodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvfold.cache.layer import CompressedLayer
from kvfold.hf.attention import logit_options


class StaticLayer(CacheLayerMixin):
    """What a graph calls. Counts are tensors, because numbers would be constants of the graph."""

    is_compileable = True
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the layer came with what is stored."""

    def attend(self, module: nn.Module, query: Tensor, options: dict[str, Any]) -> Tensor:
        """Attention output `[B, 1, Hq, Dv]` of `query [B, Hq, 1, D]` to all that is stored."""
        out = self._attend(query, *logit_options(module, query, options))
        return out.transpose(1, 2).contiguous()

    def _attend(
        self, query: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        raise NotImplementedError

    def between_steps(self) -> None:
        """Called when a step is over, outside of the graph."""

    def hand_back(self, layer: CompressedLayer) -> None:
        """Leaves the layer as if its tokens had been decoded eagerly."""
        raise NotImplementedError

    def nbytes(self, counted: set[int]) -> int:
        """Bytes of all that it holds; what lies at an address in `counted` was counted."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The least there can be: layers know by themselves what is visible."""
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class StaticBuffers(StaticLayer):
    """The buffers of a layer's store, in which a graph writes; with room for tokens to come.

    keys and values `[B, H, T, D]`, filled up to slot `used`; `evicted` are the columns that are in
    no slot.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, layer: CompressedLayer, room: int) -> None:
        super().__init__()
        store = layer.state.dense_store()
        self.first = store.keys.shape[2]
        # As views they would bring the shapes of what they are views of into the graph.
        self.keys, self.values = (buffer.data for buffer in store.reserve(room))
        self.used = torch.tensor(self.first, device=store.keys.device)
        self.evicted = torch.tensor(layer.state.seen - self.first, device=store.keys.device)
        for buffer in (self.keys, self.values):
            torch._dynamo.maybe_mark_dynamic(buffer, 2)

    def _keep_in_place(self) -> None:
        """Promises CUDA graphs that what it holds never moves: else they copy it at every step."""
        if self.keys.is_cuda:
            for tensor in self._held():
                torch._dynamo.mark_static_address(tensor)

    def _held(self) -> list[Tensor]:
        return [held for held in vars(self).values() if isinstance(held, Tensor)]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes one entry per head `[B, H, 1, D]` into the next slot."""
        slot = self.used.view(1)
        self.keys.index_copy_(2, slot, key_states)
        self.values.index_copy_(2, slot, value_states)
        self.used.add_(1)
        return self.keys, self.values

    def hand_back(self, layer: CompressedLayer) -> None:
        used = int(self.used)
        layer.update(self.keys[:, :, self.first : used], self.values[:, :, self.first : used])
        layer.state.sequence.valid = layer.state.sequence.tokens()
        layer.state.stored().crop(0)  # takes nothing back but room that was not needed

    def nbytes(self, counted: set[int]) -> int:
        return sum(held.nbytes for held in self._held())

    def get_seq_length(self) -> Tensor:  # type: ignore[override]
        """Columns of the logical sequence, as a tensor."""
        return self.used + self.evicted
