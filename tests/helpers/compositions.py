# SPDX-License-Identifier: Apache-2.0
"""Caches of compositions beside each part by hand."""

from __future__ import annotations

from torch import Tensor

from kvfold import CompressedCache, parse
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import read_by_kvfold
from tests.helpers.truth import Reader


def given(spec: str, budget: float | str = SMALL) -> float | str | None:
    return budget if parse(spec).takes_budget else None


def entries(cache: CompressedCache, layer: int, row: int, head: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[K, D]` of a head, decoded."""
    own = cache.states[layer]
    real = own.columns()[row, head] >= 0
    keys, values = own.stored().dense()
    return keys[row, head][real], values[row, head][real]


def each_head(cache: CompressedCache) -> list[tuple[int, int, int]]:
    kept = cache.stats().kept
    return [
        (layer, row, head)
        for layer, rows in enumerate(kept)
        for row, heads in enumerate(rows)
        for head in range(len(heads))
    ]


def both(selecting: str, encoding: str, heads: int, lengths: tuple[int, ...]) -> list[Reader]:
    """A method that selects, alone and followed by one that encodes."""
    budget = given(selecting)
    specs = (selecting, f"{selecting} + {encoding}")
    return [read_by_kvfold(spec, budget, heads, lengths) for spec in specs]
