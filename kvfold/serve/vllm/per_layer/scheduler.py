# SPDX-License-Identifier: Apache-2.0
"""Scheduler side of the connector for cache groups that hold parts of a context."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.per_layer.sizes import skipped
from kvfold.serve.vllm.placeholders import ServedContext
from kvfold.serve.vllm.scheduler import ContextLoad, SchedulerSide


@dataclass(frozen=True)
class CacheGroup:
    """A cache group: indices of layers that hold the same part."""

    layers: list[int]
    part: float


class PartsSchedulerSide(SchedulerSide):
    """Scheduler side that assigns slots per layer of `groups`."""

    groups: Sequence[CacheGroup] = ()

    def load(
        self, served: ServedContext, start: int, count: int, blocks: Sequence[Sequence[int]]
    ) -> ContextLoad:
        """The load of a whole context.

        Raises KvfoldError if vLLM's null pages are not the parts'.
        """
        by_layer: dict[int, list[int]] = {}
        for group, own in zip(self.groups, blocks, strict=True):
            first = skipped(count, group.part, self.block)
            used = own[: -(-count // self.block)]
            if start or [not page for page in used] != [
                place < first // self.block for place in range(len(used))
            ]:
                raise KvfoldError("vLLM left other pages of a context out than its parts say")
            slots = [
                own[i // self.block] * self.block + i % self.block for i in range(first, count)
            ]
            by_layer |= dict.fromkeys(group.layers, slots)
        whole = ContextLoad(served.id, served.salt, start, [0] * count, [])
        return dataclasses.replace(whole, by_layer=by_layer)
