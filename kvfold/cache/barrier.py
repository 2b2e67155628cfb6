# SPDX-License-Identifier: Apache-2.0
"""The barrier of one cache: layers whose eviction or encoding waits for others."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from kvfold.methods.base import Stages
from kvfold.methods.observation import Observation
from kvfold.observers.call import AttentionCall

Layer = TypeVar("Layer")
T = TypeVar("T")

ROW_BYTES = 2**24  # most bytes of attention rows that wait


class EvictionDue(NamedTuple, Generic[Layer]):
    """A layer above its size, and its stages; `counts`, `sizes` and `beside` are as of `evict`."""

    layer: Layer
    stages: Stages
    observation: Observation
    counts: Tensor
    sizes: Tensor | None
    beside: Tensor | None


class Queue(Generic[T]):
    """Arrivals at a barrier, in their order."""

    def __init__(self) -> None:
        self.arrived: list[T] = []

    def arrive(self, item: T, all_of: int) -> list[T]:
        """Adds an item; gives all if `all_of` them have arrived, who are let go, else none."""
        self.arrived.append(item)
        return self.take() if len(self.arrived) == all_of else []

    def take(self) -> list[T]:
        """All that have arrived, who are let go."""
        taken, self.arrived = self.arrived, []
        return taken


class Barrier(Generic[Layer]):
    """Where layers of one cache wait for others, or for the forward's end.

    `sized`: those whose size depends on all layers' observations (D2O, KVzip), evicted by the last
    layer's attention. `agreeing`: those that keep the same tokens (`level`), evicted by it too.
    `unjudged`: those whose scores are of the forward's logits (SirLLM), evicted when it has
    returned. `paired`: the first of two that are quantized together (MiniCache). `leaving`: those
    of which one entry leaves in this decode step; all are evicted together after the last layer's
    attention, since dozens of small operations per layer take less time in one loop than between
    attention calls.
    """

    def __init__(self) -> None:
        self.sized: Queue[tuple[Layer, Observation]] = Queue()
        self.agreeing: Queue[EvictionDue[Layer]] = Queue()
        self.unjudged: Queue[tuple[Layer, Observation]] = Queue()
        self.paired: Queue[Layer] = Queue()
        self.leaving: Queue[tuple[Layer, AttentionCall]] = Queue()

    def reset(self) -> None:
        """Lets everything go."""
        for queue in (self.sized, self.agreeing, self.unjudged, self.paired, self.leaving):
            queue.arrived.clear()


def is_too_much(leaving: list[tuple[Layer, AttentionCall]]) -> bool:
    """True if the attention rows that wait take more than ROW_BYTES."""
    call = leaving[0][1]
    assert call.row is not None
    each = call.row.untyped_storage().nbytes()
    if call.predicted is not None:
        each += call.predicted.products.untyped_storage().nbytes()
    return len(leaving) * each > ROW_BYTES
