# SPDX-License-Identifier: Apache-2.0
"""PyramidKV: fewer entries towards the top, by hand and by the released code."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.budgets import (
    SMALL,
    compressed,
)
from tests.helpers.by_hand import (
    LAYERS,
    SHAPES,
    WINDOW,
    Keep,
    Layer,
    assert_prefill,
    pyramid,
    with_window,
)
from tests.helpers.caches import ALONE
from tests.helpers.exactness import (
    read_prompt,
)
from tests.helpers.models import build
from tests.helpers.truth import Reader


def pyramid_of_the_code(tokens: int, budget: int, beta: int) -> list[int]:
    base = budget - WINDOW
    if tokens < budget:
        return [tokens] * LAYERS
    if tokens < 2 * base:
        return [budget] * LAYERS
    least = base // beta
    most = 2 * base - least
    if most >= tokens - WINDOW:
        most = tokens - WINDOW
        least = 2 * base - most
    step = (most - least) // (LAYERS - 1)
    return [most - step * layer + WINDOW for layer in range(LAYERS)]


def of_layers(counts: Callable[[int], list[int]]) -> Keep:
    def keep(layers: list[Layer]) -> list[list[list[int]]]:
        sizes = counts(len(layers[0].heads[0]))
        return [
            [with_window(head, size) for head in layer.heads]
            for layer, size in zip(layers, sizes, strict=True)
        ]

    return keep


@SHAPES
@pytest.mark.parametrize("beta", [20, 3])
@pytest.mark.parametrize("name", ["pyramidkv", "pyramidkv_official"])
def test_pyramidkv_keeps_fewer_towards_the_top(name, beta, heads, lengths):
    schedule = pyramid if name == "pyramidkv" else pyramid_of_the_code
    spec = f"{name}:window={WINDOW},beta={beta}"
    keep = of_layers(lambda tokens: schedule(tokens, SMALL, beta))
    assert_prefill(spec, SMALL, heads, lengths, keep)


def test_pyramid_layers_differ_in_length():
    ids, _ = read_prompt(ALONE)
    model = build("llama")
    cache = compressed(model, "pyramidkv:window=8")
    Reader(model, cache)(ids)
    lengths = [len(cache.positions(layer)[0][0]) for layer in range(4)]
    assert len(set(lengths)) == 4 and sum(lengths) == 4 * SMALL
