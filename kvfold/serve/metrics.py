# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics: counters of requests and tokens, gauges of contexts and the queue."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvfold.serve.engine import Engine


class ServerMetrics:
    """Metrics of one server, in a registry of its own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvfold_requests", "Requests answered.", ["route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "kvfold_request_seconds",
            "Seconds until the last byte of an answer.",
            ["route"],
            registry=self.registry,
        )
        self.tokens = Counter(
            "kvfold_tokens",
            "Tokens of prompts, of these the ones from contexts, and generated tokens.",
            ["kind"],
            registry=self.registry,
        )
        self.prefixes = Counter(
            "kvfold_prefix_cache",
            "Prompts without context_id, by whether a stored context was a prefix.",
            ["result"],
            registry=self.registry,
        )
        for kind in ("prompt", "cached", "generated"):
            self.tokens.labels(kind)
        for result in ("hit", "miss"):
            self.prefixes.labels(result)
        self.registry.register(_LiveGauges(engine))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _LiveGauges(Collector):
    """Gauges of contexts and of the queue, read at each scrape."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        """The metrics at the time of a scrape."""
        contexts, workers = self.engine.contexts, self.engine.workers
        held = contexts.all()
        in_memory = sum(one.context is not None for one in held)
        places = GaugeMetricFamily("kvfold_contexts", "Contexts held.", labels=["place"])
        places.add_metric(["memory"], in_memory)
        places.add_metric(["disk"], len(held) - in_memory)
        yield places
        for name, text, value in (
            ("bytes", "Bytes of contexts in memory.", contexts.nbytes),
            ("bytes_limit", "Bytes that contexts in memory may take.", contexts.memory),
            ("tokens", "Tokens of all contexts.", sum(one.stats.seen for one in held)),
            (
                "tokens_kept",
                "Tokens of all contexts that are kept, on average over layers and KV heads.",
                sum(one.stats.seen * one.stats.kept_fraction for one in held),
            ),
        ):
            yield GaugeMetricFamily(f"kvfold_context_{name}", text, value)
        moves = CounterMetricFamily(
            "kvfold_context_moves", "Contexts moved under the memory limit.", labels=["to"]
        )
        moves.add_metric(["disk"], contexts.to_disk)
        moves.add_metric(["memory"], contexts.to_memory)
        yield moves
        yield CounterMetricFamily(
            "kvfold_abandoned_tokens",
            "Tokens read or generated for clients that hung up before their answer ended.",
            self.engine.abandoned_tokens,
        )
        yield GaugeMetricFamily("kvfold_queue_depth", "Requests that wait.", workers.waiting)
        yield GaugeMetricFamily("kvfold_running", "Requests at work.", workers.running)
