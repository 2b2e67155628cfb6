# SPDX-License-Identifier: Apache-2.0
"""Layers of one cache whose eviction or encoding waits for other layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from kvfold.methods.observation import Observation
from kvfold.observers.call import AttentionCall

Layer = TypeVar("Layer")

ROW_BYTES = 2**24  # most bytes of attention rows that wait


class EvictionDue(NamedTuple, Generic[Layer]):
    """A layer above its size: its observation, and `counts`, `sizes`, `beside` as of `evict`."""

    layer: Layer
    observation: Observation
    counts: Tensor
    sizes: Tensor | None
    beside: Tensor | None


@dataclass
class Waiting(Generic[Layer]):
    """Layers whose eviction or encoding waits until others have attended.

    `sized`: layers whose size depends on all layers' observations (D2O, KVzip), evicted by the
    last layer's attention. `agreeing`: layers that keep the same tokens (TriAttention, `level`),
    evicted by it too. `unjudged`: layers whose scores are of the forward's logits (SirLLM), evicted
    when it has returned. `first_of_pair`: a layer that is quantized together with the next one
    (MiniCache). `evicting`: layers of which one entry leaves in this decode step; all are evicted
    together after the last layer's attention, since dozens of small operations per layer take less
    time in one loop than between attention calls.
    """

    sized: list[tuple[Layer, Observation]] = field(default_factory=list)
    first_of_pair: Layer | None = None
    agreeing: list[EvictionDue[Layer]] = field(default_factory=list)
    unjudged: list[tuple[Layer, Observation]] = field(default_factory=list)
    evicting: dict[Layer, AttentionCall] = field(default_factory=dict)

    def take_sized(self) -> list[tuple[Layer, Observation]]:
        """The layers with their observations; none waits from now on."""
        taken, self.sized = self.sized, []
        return taken

    def take_agreeing(self) -> list[EvictionDue[Layer]]:
        """The evictions that are due in all layers; none waits from now on."""
        taken, self.agreeing = self.agreeing, []
        return taken

    def take_unjudged(self) -> list[tuple[Layer, Observation]]:
        """The layers with their observations; none waits from now on."""
        taken, self.unjudged = self.unjudged, []
        return taken

    def take_evicting(self) -> dict[Layer, AttentionCall]:
        """The layers with their attention calls; none waits from now on."""
        taken, self.evicting = self.evicting, {}
        return taken

    def is_too_much(self) -> bool:
        """True if the waiting attention rows take more than ROW_BYTES."""
        call = next(iter(self.evicting.values()))
        assert call.row is not None
        each = call.row.untyped_storage().nbytes()
        if call.predicted is not None:
            each += call.predicted.products.untyped_storage().nbytes()
        return len(self.evicting) * each > ROW_BYTES

    def reset(self) -> None:
        """Empties all lists."""
        self.sized, self.first_of_pair, self.agreeing, self.evicting = [], None, [], {}
        self.unjudged = []
