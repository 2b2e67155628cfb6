# SPDX-License-Identifier: Apache-2.0
"""D2O: sizes of layers, merged entries and moving thresholds, by hand and as released."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest

from kvfold import CompressedCache, KvfoldError
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    LAYERS,
    SHAPES,
    ByHand,
    Head,
    Layer,
    assert_steps,
    d2o_kept,
    d2o_step,
    merge,
    moved,
    nearest,
    rounded,
)
from tests.helpers.models import prompts
from tests.helpers.truth import Reader


@pytest.mark.parametrize("layer", [4, -5, 50])
@pytest.mark.parametrize("spec", ["d2o", "d2o_official"])
def test_a_layer_that_there_is_not_is_refused(model, spec, layer):
    cache = CompressedCache(model, f"{spec}:sinks=2,skip_layers=0/{layer}", 30)
    with pytest.raises(KvfoldError, match=f"d2o:skip_layers names layer {layer} of 4 compressed"):
        Reader(model, cache)(prompts((64,))[0])


@pytest.mark.parametrize("part", [0.05, 0.3])
def test_d2o_as_released_says_what_it_spends_beside_its_budget(model, part):
    ids = prompts((128,))[0]
    cache = CompressedCache(model, "d2o_official:sinks=0", part)
    Reader(model, cache)(ids)
    stats = cache.stats()
    assert [layer[0][0] for layer in stats.kept[:2]] == [128, 128] == stats.kept[3][0]
    assert stats.kept[2][0][0] <= 128 * part * 1.7
    assert f"{stats.mean_kept:.1f} entries" in str(stats) and "0, 1, -1 stay whole" in str(stats)
    assert "stay whole" not in str(CompressedCache(model, "d2o_official", part).stats())


def filled(parts: list[float], total: float, most: int) -> list[float]:
    """`total` in proportion to `parts`, but none above `most`."""
    full: set[int] = set()
    while True:
        open_ = [i for i in range(len(parts)) if i not in full]
        scale = (total - most * len(full)) / sum(parts[i] for i in open_)
        over = {i for i in open_ if parts[i] * scale > most}
        if not over:
            return [most if i in full else parts[i] * scale for i in range(len(parts))]
        full |= over


def d2o_sizes(layers: list[Layer], budget: int, skipped: tuple[int, ...] = ()) -> list[int]:
    """More for layers whose column sums vary little."""
    tokens = len(layers[0].heads[0])
    open_ = [i for i in range(len(layers)) if i not in skipped]
    variances = []
    for i in open_:
        of_heads = []
        for head in layers[i].heads:
            mean = float(head.sums.sum()) / tokens
            of_heads.append(sum((float(c) - mean) ** 2 for c in head.sums) / (tokens - 1))
        variances.append(sum(of_heads) / len(of_heads))
    low, high = min(variances), max(variances)
    parts = [math.exp(-(v - low) / (high - low or 1)) for v in variances]
    total = budget * len(layers) - len(skipped) * tokens
    shares = iter(rounded(filled(parts, total, tokens), total, tokens))
    return [tokens if i in skipped else next(shares) for i in range(len(layers))]


def nearest_value(head: Head, kept: list[int]) -> list[tuple[int, float, int]]:
    """As `nearest`, among values."""
    twin = copy.copy(head)
    twin.keys = head.values
    return nearest(twin, kept)


def d2o_independent_step(layer: Layer, size: int) -> None:
    """Keys join by keys, values by values, each past a threshold of its own."""
    for head in layer.heads:
        if len(head) <= size:
            continue
        kept = d2o_kept(head, size, recent=0.25)
        before = head.threshold or (None, None)
        after, entries = [], {}
        for name, find, old in zip(
            ("keys", "values"), (nearest, nearest_value), before, strict=True
        ):
            found, twin = find(head, kept), copy.copy(head)
            twin.keys, twin.values = head.keys.clone(), head.values.clone()
            after.append(moved(old, sum(u for _, u, _ in found) / len(found), 0.7))
            merge(twin, [f for f in found if f[1] >= after[-1] - 1e-12], official=False)
            entries[name] = getattr(twin, name)
        head.threshold, head.keys, head.values = tuple(after), entries["keys"], entries["values"]
        head.keep(kept)


def d2o_official_step(layer: Layer, size: int) -> None:
    """All heads decide together, about the mean of their i-th evicted entries."""
    if len(layer.heads[0]) <= size:
        return
    kept = [d2o_kept(head, size, recent=0.5) for head in layer.heads]
    found = [nearest(head, of_head) for head, of_head in zip(layer.heads, kept, strict=True)]
    together = [sum(u for _, u, _ in same) / len(same) for same in zip(*found, strict=True)]
    threshold = moved(layer.heads[0].threshold, sum(together) / len(together), 0.5)
    for head, of_head, evicted in zip(layer.heads, kept, found, strict=True):
        head.threshold = threshold
        reaching = zip(evicted, together, strict=True)
        merge(head, [f for f, u in reaching if u >= threshold - 1e-12], official=True)
        head.keep(of_head)


def d2o_official_sizes(layers: list[Layer], part: float) -> list[int]:
    """The released code: F is the mean of a layer's variances, brought to 0 … 1 over its heads."""
    tokens, means = len(layers[0].heads[0]), []
    for layer in layers:
        variances = [float(head.sums.var()) for head in layer.heads]
        low, high = min(variances), max(variances)
        means.append(sum((v - low) / (high - low + 1e-6) for v in variances) / len(variances))
    whole = sum(math.exp(-mean) for mean in means)
    sizes = [10**9] * len(layers)
    for index in range(2, len(layers) - 1):
        ratio = min(1.0, max(0.01, math.exp(-means[index]) / whole * len(layers) * part))
        hitters, recent = int(tokens * ratio * 0.5), int(tokens * ratio * 0.5)
        sizes[index] = hitters + recent
    return sizes


def sized_once(
    step: Callable[[Layer, int], None],
    sized: Callable[[list[Layer]], list[int]],
) -> Callable[[ByHand], None]:
    """Layers get their sizes at the end of the prompt, and hold them."""
    sizes: dict[int, list[int]] = {}

    def change(one: ByHand) -> None:
        if id(one) not in sizes:
            sizes[id(one)] = sized(one.layers)
        for layer, size in zip(one.layers, sizes[id(one)], strict=True):
            step(layer, size)

    return change


@pytest.mark.slow
@SHAPES
def test_d2o_sizes_layers_merges_and_moves_its_threshold(heads, lengths):
    sizes = partial(d2o_sizes, budget=SMALL)
    assert_steps("d2o", SMALL, heads, lengths, sized_once(d2o_step, sizes))


@pytest.mark.slow
@SHAPES
def test_d2o_merges_keys_and_values_apart(heads, lengths):
    sizes, spec = partial(d2o_sizes, budget=SMALL), "d2o:similarity=independent"
    assert_steps(spec, SMALL, heads, lengths, sized_once(d2o_independent_step, sizes))


@pytest.mark.slow
@SHAPES
def test_d2o_with_whole_layers_inside_the_budget(heads, lengths):
    """The first two layers and the last hold a prompt's tokens; the other what they leave."""

    def sizes(layers: list[Layer]) -> list[int]:
        budget = int(len(layers[0].heads[0]) * 0.8125)
        return d2o_sizes(layers, budget, skipped=(0, 1, LAYERS - 1))

    spec = "d2o_official:spending=exact"
    assert_steps(spec, 0.8125, heads, lengths, sized_once(d2o_official_step, sizes))


@pytest.mark.slow
@SHAPES
def test_d2o_as_released(heads, lengths):
    """The first two layers and the last keep everything beside the budget, whatever it is."""
    sizes = partial(d2o_official_sizes, part=0.3)
    assert_steps("d2o_official", 0.3, heads, lengths, sized_once(d2o_official_step, sizes))
