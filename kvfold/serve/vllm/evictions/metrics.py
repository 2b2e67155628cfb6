# SPDX-License-Identifier: Apache-2.0
"""Evictions in vLLM's log and at its /metrics."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from kvfold.serve.vllm.evictions.schedule import EvictionCounts

METRICS = {
    "evictions": "Evictions from requests, a prompt's and those in rounds.",
    "blocks_evicted": "Blocks that requests gave back as what they held was evicted.",
    "read_anew": "Requests that were preempted while they wrote, and read anew.",
}


class EvictionStats(KVConnectorStats):
    """Counts of an interval, as `EvictionCounts`."""

    @classmethod
    def of(cls, counts: EvictionCounts) -> EvictionStats:
        """These counts."""
        return cls(asdict(counts))

    def reset(self) -> None:
        """Starts an interval."""
        self.data = asdict(EvictionCounts())

    def aggregate(self, other: KVConnectorStats) -> EvictionStats:
        """The counts of both."""
        return EvictionStats({name: self.data[name] + other.data[name] for name in METRICS})

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log says of an interval."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """True if nothing was counted."""
        return not any(self.data.values())


class EvictionMetrics(KVConnectorPromMetrics):
    """Counters `vllm:kvfold_evictions`, `vllm:kvfold_blocks_evicted`, `vllm:kvfold_read_anew`."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], values: dict[int, Any]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, values)
        self._of_engines = {
            name: create_metric_per_engine(
                self._counter_cls(
                    name=f"vllm:kvfold_{name}", documentation=text, labelnames=labelnames
                ),
                values,
            )
            for name, text in METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the counts of an engine's step."""
        for name, of_engines in self._of_engines.items():
            of_engines[engine_idx].inc(transfer_stats_data[name])
