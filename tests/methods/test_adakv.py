# SPDX-License-Identifier: Apache-2.0
"""AdaKV: which entries each head keeps, by hand and as released, and its options."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    LAYERS,
    SHAPES,
    WINDOW,
    Layer,
    adaptive,
    assert_prefill,
    pyramid,
    votes,
    with_window,
)
from tests.helpers.padded_prefill import kept


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["adakv:window=8", "adakv:window=8,normalize=true"])
def test_adakv_spends_exactly_a_layer_s_budget(model, spec):
    counts, cache = kept(model, spec, 20)
    assert counts.sum(-1).eq(40).all()
    assert counts.min() >= 8 + int(12 * 0.2)
    assert counts.unique().numel() > 4
    newest = set(range(56, 64))
    assert all(newest <= set(head.tolist()) for head in cache.positions(1)[0])


def test_adakv_with_a_floor_of_one_is_snapkv(model):
    ours, theirs = (
        kept(model, spec, 20)[1] for spec in ("adakv:window=8,floor=1", "snapkv:window=8")
    )
    for layer in range(4):
        for row in range(3):
            for a, b in zip(ours.positions(layer)[row], theirs.positions(layer)[row], strict=True):
                assert a.tolist() == b.tolist()


def test_adakv_options_reach_the_allocation(model):
    specs = ["", ",floor=0.9", ",rule=blend", ",normalize=true"]
    counts = [kept(model, f"adakv:window=8{more}", 20)[0].flatten().tolist() for more in specs]
    assert len(set(map(tuple, counts))) == len(specs)


def test_adakv_shares_another_method_s_budgets_among_heads(model):
    pyramid = kept(model, "pyramidkv:window=8", 20)[0]
    shared = kept(model, "pyramidkv:window=8 + adakv", 20)[0]
    assert torch.equal(shared.sum(-1), pyramid.sum(-1))
    assert not torch.equal(shared, pyramid)


def adakv(layers: list[Layer], sizes: list[int], floor: float) -> list[list[list[int]]]:
    kept = []
    for layer, size in zip(layers, sizes, strict=True):
        scores = [votes(head) for head in layer.heads]
        counts = adaptive(scores, size - WINDOW, floor)
        kept.append([with_window(h, n + WINDOW) for h, n in zip(layer.heads, counts, strict=True)])
    return kept


@pytest.mark.slow
@SHAPES
@pytest.mark.parametrize("floor", [0.2, 0.0, 0.7])
def test_adakv_shares_a_layer_among_its_heads(floor, heads, lengths):
    held = assert_prefill(
        f"adakv:window={WINDOW},floor={floor}",
        SMALL,
        heads,
        lengths,
        lambda layers: adakv(layers, [SMALL] * LAYERS, floor),
    )
    if heads > 1 and floor < 0.7:
        assert len({n for layer in held.stats().kept for n in layer[0]}) > 2


def blended(scores: list[list[float]], mean: int, part: float, normalize: bool) -> list[int]:
    """The released shares: what the layer's best entries say, mixed with even ones and rounded."""
    weighed = scores
    if normalize:
        held = [sum(sorted(row, reverse=True)[:mean]) / sum(row) for row in scores]
        weighed = [
            [score * share for score in row] for row, share in zip(scores, held, strict=True)
        ]
    everyone = sorted((-s, h, j) for h, row in enumerate(weighed) for j, s in enumerate(row))
    won = [h for _, h, _ in everyone[: len(scores) * mean]]
    return [round(won.count(h) * (1 - part) + int(mean * part)) for h in range(len(scores))]


@pytest.mark.slow
@SHAPES
@pytest.mark.parametrize("part", [0.2, 0.5])
@pytest.mark.parametrize("normalize", [False, True])
def test_adakv_as_released(normalize, part, heads, lengths):
    def keep(layers: list[Layer]) -> list[list[list[int]]]:
        kept = []
        for layer in layers:
            scores = [votes(head) for head in layer.heads]
            counts = blended(scores, SMALL - WINDOW, part, normalize)
            sized = zip(layer.heads, counts, strict=True)
            kept.append([with_window(head, count + WINDOW) for head, count in sized])
        return kept

    spec = f"adakv:window={WINDOW},rule=blend,floor={part},normalize={str(normalize).lower()}"
    assert_prefill(spec, SMALL, heads, lengths, keep)


@SHAPES
def test_adakv_shares_a_pyramid_among_its_heads(heads, lengths):
    def keep(layers: list[Layer]) -> list[list[list[int]]]:
        return adakv(layers, pyramid(len(layers[0].heads[0]), SMALL, 20), 0.2)

    assert_prefill(f"pyramidkv:window={WINDOW} + adakv", SMALL, heads, lengths, keep)
