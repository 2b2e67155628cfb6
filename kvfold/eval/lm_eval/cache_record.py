# SPDX-License-Identifier: Apache-2.0
"""Statistics of a run's caches and truncated prompts, for the harness's record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvfold.cache.stats import Stats


class KeptShare(NamedTuple):
    """One cache: entries stored over entries seen, its bytes, and the bytes of a full cache."""

    fraction: float
    nbytes: int
    nbytes_full: int
    forced_over_budget: bool


@dataclass
class CacheRecord:
    """Statistics of the caches of one kind of request; a batch of prompts is one cache."""

    caches: list[KeptShare] = field(default_factory=list)

    def add(self, stats: Stats) -> None:
        """Adds the statistics of one cache."""
        over = stats.forced_over_budget
        self.caches.append(KeptShare(stats.kept_fraction, stats.nbytes, stats.nbytes_full, over))

    def summary(self) -> dict[str, Any]:
        """Number of caches, and their kept fraction and bytes; bytes are means.

        `whole` counts caches that evicted nothing; unless quantized or pruned, they answer like a
        full cache. `forced_over_budget` counts budgets without room beside sinks and window.
        """
        fractions, nbytes, full, over = zip(*self.caches, strict=True)
        count = len(self.caches)
        return {
            "caches": count,
            "whole": fractions.count(1.0),
            "forced_over_budget": sum(over),
            "kept_mean": sum(fractions) / count,
            "kept_least": min(fractions),
            "kept_most": max(fractions),
            "nbytes": sum(nbytes) / count,
            "nbytes_full": sum(full) / count,
            "bytes_ratio": sum(nbytes) / sum(full),
        }


@dataclass
class TruncationCount:
    """Requests truncated on the left, and the tokens cut off in all."""

    requests: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        """Adds a request that lost `tokens` tokens; 0 does not count."""
        self.requests += tokens > 0
        self.tokens += tokens
