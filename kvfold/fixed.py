# SPDX-License-Identifier: Apache-2.0
"""One layer while a compiled graph decodes: its entries, in buffers with room for those to come."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvfold.compat import CacheLayerMixin, head_scale, sinks_of, softcap_of
from kvfold.kernels.fixed import attend_to_buffers, attend_to_fixed_segments
from kvfold.layer import CompressedLayer
from kvfold.store.encoded import Flat
from kvfold.store.segments import Segments


def fixed(layer: CompressedLayer, room: int) -> FixedLayer:
    """A layer between two forwards, with `room` for so many more tokens."""
    view = layer.stored().view()
    return (
        FixedSegments(layer, view, room) if isinstance(view, Segments) else Rectangle(layer, room)
    )


class FixedLayer(CacheLayerMixin):
    """The buffers of a layer's store, in which a graph writes; nothing that is stored is moved.

    keys and values `[B, H, T, D]`, filled up to slot `used`; `evicted` are the columns that are in
    no slot. Both are tensors, because numbers would be constants of the graph.
    """

    is_compileable = True
    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, layer: CompressedLayer, room: int, counters: torch.device | str) -> None:
        super().__init__()
        store = layer.stored()
        self.first = store.keys.shape[2]
        # As views they would bring the shapes of what they are views of into the graph.
        self.keys, self.values = (buffer.data for buffer in store.reserve(room))
        self.used = torch.tensor(self.first, device=counters)
        self.evicted = torch.tensor(layer.seen - self.first, device=counters)
        self.is_initialized = True
        for buffer in (self.keys, self.values):
            torch._dynamo.maybe_mark_dynamic(buffer, 2)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the layer came with its buffers."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes one entry per head `[B, H, 1, D]` into the next slot."""
        slot = self.used.view(1).to(self.keys.device)
        self.keys.index_copy_(2, slot, key_states)
        self.values.index_copy_(2, slot, value_states)
        self.used.add_(1)
        return self.keys, self.values

    def attend(self, module: nn.Module, query: Tensor, options: dict[str, Any]) -> Tensor:
        """Attention output `[B, 1, Hq, Dv]` of `query [B, Hq, 1, D]` to all that is stored."""
        scale = head_scale(module, query, options.get("scaling"))
        out = self._attend(query, scale, softcap_of(options), sinks_of(options))
        return out.transpose(1, 2).contiguous()

    def _attend(
        self, query: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        raise NotImplementedError

    def written(self) -> tuple[Tensor, Tensor]:
        """The new entries' keys and values `[B, H, S, D]`."""
        used = int(self.used)
        return self.keys[:, :, self.first : used], self.values[:, :, self.first : used]

    def get_seq_length(self) -> Tensor:  # type: ignore[override]
        """Columns of the logical sequence, as a tensor."""
        return self.used + self.evicted

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The least there can be: layers know by themselves what is visible."""
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class Rectangle(FixedLayer):
    """All that is stored is in the buffers; `visible [B, H, T]` says where."""

    def __init__(self, layer: CompressedLayer, room: int) -> None:
        super().__init__(layer, room, layer.stored().keys.device)
        self.visible = torch.zeros(self.keys.shape[:3], dtype=torch.bool, device=self.keys.device)
        self.visible[:, :, : self.first] = layer.columns() >= 0
        torch._dynamo.maybe_mark_dynamic(self.visible, 2)
        if self.keys.is_cuda:
            # Else CUDA graphs would copy the buffers at every step.
            for tensor in (self.keys, self.values, self.visible, self.used):
                torch._dynamo.mark_static_address(tensor)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.visible.index_fill_(2, self.used.view(1), True)
        return super().update(key_states, value_states)

    def _attend(
        self, query: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        return attend_to_buffers(
            query,
            self.keys,
            self.values,
            self.visible,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )


class FixedSegments(FixedLayer):
    """Heads of different lengths: the buffers are their tails, in front of which nothing moves.

    A rectangle would give back the memory that different lengths have freed.
    """

    def __init__(self, layer: CompressedLayer, view: Segments, room: int) -> None:
        # The lengths are read on the CPU, at every step.
        super().__init__(layer, room, "cpu")
        old_keys, old_values = view.keys.encoded, view.values.encoded
        assert isinstance(old_keys, Flat) and isinstance(old_values, Flat)
        self.old_keys, self.old_values = old_keys.rows, old_values.rows
        self.lengths = torch.tensor(old_keys.lengths)
        self.alive = torch.tensor(view.keys.alive)
        self.start = self.used.clone()
        tokens = layer.logical.tokens()
        self.shown = torch.ones(layer.stored().keys.shape[0], view.new, dtype=torch.bool)
        if tokens is not None:
            self.shown[:] = tokens[:, layer.seen - view.new :]
        for rows in (self.old_keys, self.old_values):
            torch._dynamo.maybe_mark_dynamic(rows, 0)

    def _attend(
        self, query: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        out: Tensor = attend_to_fixed_segments(
            query,
            self.old_keys,
            self.old_values,
            self.lengths,
            self.keys,
            self.values,
            self.alive,
            self.shown,
            self.start,
            self.used,
            scale,
            softcap,
            sinks,
        )
        return out
