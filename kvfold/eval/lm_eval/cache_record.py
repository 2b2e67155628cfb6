# SPDX-License-Identifier: Apache-2.0
"""What the caches of a run really held, and what did not fit into the model, for its record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvfold.cache.stats import Stats


class Kept(NamedTuple):
    """One cache: entries stored over entries seen, bytes, and the bytes of a full cache."""

    fraction: float
    nbytes: int
    nbytes_full: int
    forced_over_budget: bool


@dataclass
class Held:
    """The caches of one kind of request; a batch of prompts shares one cache."""

    caches: list[Kept] = field(default_factory=list)

    def add(self, stats: Stats) -> None:
        """Notes what one cache holds."""
        over = stats.forced_over_budget
        self.caches.append(Kept(stats.kept_fraction, stats.nbytes, stats.nbytes_full, over))

    def summary(self) -> dict[str, Any]:
        """How many caches, and what they kept; bytes are means.

        `whole` caches evicted nothing, so they answer as a full cache does unless entries are
        packed or pruned. `forced_over_budget` ones had a budget below their sinks and window.
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
class Truncated:
    """What was cut off on the left."""

    requests: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        """Notes that one request lost so many `tokens`; 0: none."""
        self.requests += tokens > 0
        self.tokens += tokens
