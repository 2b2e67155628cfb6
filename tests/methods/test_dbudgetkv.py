# SPDX-License-Identifier: Apache-2.0
"""DBudgetKV: where its cut falls, by hand, and its options."""

from __future__ import annotations

import math

import pytest
from torch import Tensor

from kvfold import KvfoldError, parse
from kvfold.observers.last_queries import window_of
from tests.helpers.by_hand import (
    SHAPES,
    SINKS,
    WINDOW,
    Layer,
    assert_prefill,
    best,
    newest,
    rows_of_layer,
    votes,
)
from tests.helpers.padded_prefill import LENGTHS, kept


def test_dbudgetkv_keeps_sinks_and_a_tail_of_each_row(model):
    counts, cache = kept(model, "dbudgetkv:threshold=0.2")
    assert counts[:2].tolist() == [[[64] * 2, [53] * 2, [24] * 2]] * 2
    assert counts[2:].unique().numel() > 2 and (counts[2:] < counts[:1]).any()
    for row, length in enumerate(LENGTHS):
        for layer in (2, 3):
            count = int(counts[layer, row, 0])
            places = cache.positions(layer)[row][0] - (64 - length)
            assert places.tolist() == [0, 1, 2, 3, *range(length - count + 4, length)]


def test_dbudgetkv_by_attention_keeps_the_last_and_the_best(model):
    counts, cache = kept(model, "dbudgetkv:threshold=0.2,ranking=attention,keep_layers=1")
    assert counts[1].tolist() == [[64] * 2, [53] * 2, [24] * 2]
    first, second = cache.positions(2)[0]
    assert len(first) == len(second) and first.tolist() != second.tolist()
    assert set(range(56, 64)) <= set(first.tolist())


def test_dbudgetkv_options_reach_the_cut(model):
    specs = ["", ",sinks=2", ",rows=3", ",include_sinks=true", ",threshold=0.3", ",keep_layers=2"]
    counts = [kept(model, f"dbudgetkv:threshold=0.2{more}")[0] for more in specs]
    assert len({tuple(c.flatten().tolist()) for c in counts}) == len(specs)
    for rows, ranking, window in ((1, "position", 1), (3, "position", 3), (3, "attention", 8)):
        needs = parse(f"dbudgetkv:rows={rows},ranking={ranking}").stages().needs
        assert window_of(needs) == window


def test_kept_layers_count_from_the_end_too(model):
    spec = "dbudgetkv:threshold=0.2,keep_layers="
    for last, same in (("-1", "3"), ("0,-2", "0/2")):
        counts, _ = kept(model, spec + last)
        assert counts.equal(kept(model, spec + same)[0])
        assert not counts.equal(kept(model, spec + "none")[0])
    for layer in (4, -5):
        with pytest.raises(KvfoldError, match=f"dbudgetkv:keep_layers names layer {layer} of 4 "):
            kept(model, f"{spec}{layer}")


def norm_cut(rows: Tensor, order: list[list[int]], threshold: float, counted: list[int]) -> int:
    """How many of each head's `order`, least important first, may go; rows `[Hq, T]`."""
    squares, group = rows.square().tolist(), len(rows) // len(order)

    def norm(gone: int) -> float:
        left = [order[h // group][gone:] + counted for h in range(len(rows))]
        return sum(
            math.sqrt(sum(row[j] for j in slots)) for row, slots in zip(squares, left, strict=True)
        ) / len(rows)

    base = norm(0)
    return max(i for i in range(len(order[0])) if base - norm(i) <= threshold * base)


def dbudgetkv(
    layers: list[Layer], threshold: float, include_sinks: bool = False, rows: int = 1
) -> list[list[list[int]]]:
    kept = []
    for layer in layers:
        attention = rows_of_layer(layer)[:, -rows:]
        attention = attention.sum(1) / (attention != 0).sum(1).clamp(min=1)
        tokens = attention.shape[1]
        order = [list(range(SINKS, tokens)) for _ in layer.heads]
        counted = list(range(SINKS)) if include_sinks else []
        gone = norm_cut(attention, order, threshold, counted)
        kept.append([[*range(SINKS), *range(SINKS + gone, tokens)] for _ in layer.heads])
    return kept


@SHAPES
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("threshold=0.05", {"threshold": 0.05}),
        ("threshold=0.3", {"threshold": 0.3}),
        ("threshold=0.05,include_sinks=true", {"threshold": 0.05, "include_sinks": True}),
        ("threshold=0.05,rows=3", {"threshold": 0.05, "rows": 3}),
    ],
)
def test_dbudgetkv_cuts_where_the_norm_would_fall(options, named, heads, lengths):
    spec = f"dbudgetkv:{options},keep_layers=none"
    held = assert_prefill(spec, None, heads, lengths, lambda layers: dbudgetkv(layers, **named))
    assert len({layer[0][0] for layer in held.stats().kept}) > 1


@SHAPES
def test_dbudgetkv_ranks_by_attention_too(heads, lengths):
    def keep(layers: list[Layer]) -> list[list[list[int]]]:
        kept = []
        for layer in layers:
            scores = [votes(head, kernel=1) for head in layer.heads]
            order = [best(row, len(row))[::-1] for row in scores]
            gone = norm_cut(rows_of_layer(layer)[:, -1], order, 0.2, [])
            kept.append(
                [
                    candidates[gone:] + newest(head, WINDOW)
                    for candidates, head in zip(order, layer.heads, strict=True)
                ]
            )
        return kept

    spec = "dbudgetkv:threshold=0.2,ranking=attention,keep_layers=none"
    assert_prefill(spec, None, heads, lengths, keep)
