# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics: counters of requests and tokens, gauges of contexts and the queue."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvfold.serve.engine import Engine
from kvfold.serve.pool import Pool
from kvfold.serve.shadows import Shadows
from kvfold.serve.stored import Value


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
        yield from _of_pool(contexts)
        yield from _of_pool(self.engine.sessions.held)
        held = contexts.all()
        for name, text, value in (
            ("tokens", "Tokens of all contexts.", sum(one.stats.seen for one in held)),
            (
                "tokens_kept",
                "Tokens of all contexts that are kept, on average over layers and KV heads.",
                sum(one.stats.seen * one.stats.kept_fraction for one in held),
            ),
        ):
            yield GaugeMetricFamily(f"kvfold_context_{name}", text, value)
        yield CounterMetricFamily(
            "kvfold_abandoned_tokens",
            "Tokens read or generated for clients that hung up before their answer ended.",
            self.engine.abandoned_tokens,
        )
        if self.engine.shadows is not None:
            yield from _of_shadows(self.engine.shadows)
        yield GaugeMetricFamily("kvfold_queue_depth", "Requests that wait.", workers.waiting)
        yield GaugeMetricFamily("kvfold_running", "Requests at work.", workers.running)


def _of_shadows(shadows: Shadows) -> Iterator[Metric]:
    """Answers compared with a full cache's, and whether the certificate holds by them."""
    test = shadows.test
    yield CounterMetricFamily(
        "kvfold_shadowed", "Answers compared with a full cache's.", test.samples
    )
    skipped = CounterMetricFamily(
        "kvfold_shadow_skipped", "Sampled requests that were not compared.", labels=["reason"]
    )
    for reason, count in shadows.skipped.items():
        skipped.add_metric([reason], count)
    yield skipped
    for name, text, value in (
        ("shadow_waiting", "Answers to compare when the server is idle.", shadows.waiting),
        ("shadow_loss", "Mean clipped KL of these, in nats per token.", shadows.mean_loss),
        ("shadow_e_value", "Evidence that the mean is above the tolerance.", shadows.e_value),
        ("certificate_holds", "0 once the evidence was enough.", int(not test.rejected)),
    ):
        yield GaugeMetricFamily(f"kvfold_{name}", text, value)


def _of_pool(pool: Pool[Value]) -> Iterator[Metric]:
    """Number, bytes and moves of contexts or sessions."""
    noun, held = pool.noun, pool.all()
    cold = [one.stats.cold for one in held if one.value is not None]
    in_memory = len(cold)
    places = GaugeMetricFamily(f"kvfold_{noun}s", f"{noun.title()}s held.", labels=["place"])
    places.add_metric(["memory"], in_memory)
    places.add_metric(["disk"], len(held) - in_memory)
    yield places
    yield GaugeMetricFamily(f"kvfold_{noun}_bytes", f"Bytes of {noun}s in memory.", pool.nbytes)
    yield GaugeMetricFamily(
        f"kvfold_{noun}_bytes_limit", f"Bytes that {noun}s in memory may take.", pool.memory
    )
    of_cold = GaugeMetricFamily(
        f"kvfold_{noun}_cold_bytes",
        f"Cold bytes of {noun}s in memory, by where these bytes lie.",
        labels=["place"],
    )
    of_cold.add_metric(["memory"], sum(one.host for one in cold))
    of_cold.add_metric(["disk"], sum(one.filed for one in cold))
    yield of_cold
    moves = CounterMetricFamily(
        f"kvfold_{noun}_moves", f"{noun.title()}s moved under the memory limit.", labels=["to"]
    )
    moves.add_metric(["disk"], pool.to_disk)
    moves.add_metric(["memory"], pool.to_memory)
    yield moves
