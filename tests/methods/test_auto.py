# SPDX-License-Identifier: Apache-2.0
"""auto: the fewest entries within its tolerance, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers.by_hand import (
    CLOSE,
    LAYERS,
    SHAPES,
    SINKS,
    WINDOW,
    Layer,
    newest,
    pooled,
    prompt_read,
    read_by_kvfold,
)


def output_change(layer: Layer, kept: list[list[int]], queries: slice) -> float:
    """Relative change of the layer's attention output when only `kept` stays in each head."""
    change = whole = 0.0
    for head, slots in zip(layer.heads, kept, strict=True):
        for row in head.rows[:, queries].flatten(0, 1):
            full = row @ head.values
            left = row[slots] @ head.values[slots] / row[slots].sum()
            change += float((left - full).square().sum())
            whole += float(full.square().sum())
    return math.sqrt(change / whole)


def ranking(layer: Layer) -> list[tuple[float, int, int]]:
    """Entries of all heads that may go, the best first: score, head, slot."""
    ranked = []
    for h, head in enumerate(layer.heads):
        rows = head.rows[:, -WINDOW:].flatten(0, 1)
        change = torch.zeros(len(head), dtype=torch.float64)
        for row in rows:
            change += (row[:, None] * (head.values - row @ head.values)).square().sum(-1)
        scores = pooled(change.sqrt().tolist(), 7, "max")
        free = range(SINKS, len(head) - WINDOW)
        ranked += [(-scores[j], h, j) for j in free]
    return sorted(ranked)


def auto_kept(layer: Layer, chosen: list[tuple[float, int, int]]) -> list[list[int]]:
    kept = [[*range(SINKS), *newest(head, WINDOW)] for head in layer.heads]
    for _, h, j in chosen:
        kept[h].append(j)
    return kept


@pytest.mark.cases(2)
@pytest.mark.slow
@SHAPES
@pytest.mark.parametrize("tolerance", [0.05, 0.3])
def test_auto_keeps_the_fewest_within_its_tolerance(tolerance, heads, lengths):
    spec = f"auto:window={WINDOW},tolerance={tolerance},measure=true"
    cache = read_by_kvfold(spec, None, heads, lengths).cache
    errors = torch.zeros(LAYERS, 2)
    for row, length in enumerate(lengths):
        for index, layer in enumerate(prompt_read(heads, lengths, row).layers):
            found = [p - (64 - length) for p in cache.positions(index)[row]]
            free = sum(map(len, found)) - heads * (SINKS + WINDOW)
            ranked = ranking(layer)
            kept = auto_kept(layer, ranked[:free])
            assert [p.tolist() for p in found] == [sorted(slots) for slots in kept]
            predicted = output_change(layer, kept, slice(-WINDOW, None))
            assert predicted <= tolerance
            if free:
                one_less = auto_kept(layer, ranked[: free - 1])
                assert output_change(layer, one_less, slice(-WINDOW, None)) > tolerance
            errors[index, 0] += predicted / len(lengths)
            measured = output_change(layer, kept, slice(-2 * WINDOW, -WINDOW))
            errors[index, 1] += measured / len(lengths)
    torch.testing.assert_close(torch.tensor(cache.stats().errors), errors, **CLOSE)
    assert 0 < cache.stats().kept_fraction < 1
