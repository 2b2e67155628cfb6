# SPDX-License-Identifier: Apache-2.0
"""A dense layer that evicts nothing while a compiled graph decodes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.cache.layer import CompressedLayer
from kvfold.generation.static.layer import StaticBuffers
from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.static_dense import attend_to_buffers


class StaticDense(StaticBuffers):
    """Static buffers in which all entries stay; `visible [B, H, T]` is true at slots with one."""

    def __init__(self, layer: CompressedLayer, room: int) -> None:
        super().__init__(layer, room)
        self.visible = torch.zeros(self.keys.shape[:3], dtype=torch.bool, device=self.keys.device)
        self.visible[:, :, : self.first] = layer.state.columns() >= 0
        torch._dynamo.maybe_mark_dynamic(self.visible, 2)
        self.bias = self._widened_bias(layer)
        self._keep_in_place()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.visible.index_fill_(2, self.used.view(1), True)
        return super().update(key_states, value_states)

    def _attend(self, query: Tensor, options: LogitOptions) -> Tensor:
        return attend_to_buffers(query, self.keys, self.values, self.visible, self.bias, **options)
