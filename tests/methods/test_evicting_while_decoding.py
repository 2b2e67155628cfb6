# SPDX-License-Identifier: Apache-2.0
"""H2O, RoCo, StreamingLLM and others: each step's eviction, by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    SHAPES,
    ByHand,
    Head,
    assert_steps,
    best,
    cam_step,
    d2o_step,
    first_and_newest,
    h2o,
)


def roco(head: Head, budget: int, recent: int = 10, share: float = 0.3) -> list[int]:
    """The lowest means go, from among the `budget - r` of lowest deviation."""
    mean = head.sums / head.queries
    deviation = (head.squares / head.queries - mean**2).clamp(min=0).sqrt()
    for age in range(1, recent + 1):
        deviation[-age] = 1e9 - age
    unstable = best(deviation, int(share * budget) + 1)
    feasible = [i for i in range(len(head)) if i not in unstable]
    stay = best(mean[feasible], budget - len(unstable))
    return unstable + [feasible[i] for i in stay]


def holding(choose: Callable[[Head, int], list[int]], budget: int) -> Callable[[ByHand], None]:
    def change(one: ByHand) -> None:
        for head in (head for layer in one.layers for head in layer.heads):
            if len(head) > budget:
                head.keep(choose(head, budget))

    return change


@pytest.mark.cases(2)
@pytest.mark.slow
@SHAPES
@pytest.mark.parametrize(
    ("spec", "choose", "budget"),
    [
        ("h2o", h2o, SMALL),
        (
            "h2o:recent=0.2,normalize=visible_queries",
            partial(h2o, recent=0.2, mean=True),
            SMALL,
        ),
        ("roco", roco, SMALL),
        ("roco", roco, 40),  # ten of thirteen protected ones are the last
        (
            "roco:protect_recent=3,protect_std_ratio=0.7",
            partial(roco, recent=3, share=0.7),
            SMALL,
        ),
        ("streaming_llm_original", first_and_newest, SMALL),
    ],
)
def test_methods_that_evict_while_decoding(spec, choose, budget, heads, lengths):
    lengths = lengths[:2] if budget == 40 else lengths
    assert_steps(spec, budget, heads, lengths, holding(choose, budget))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(17,), (SMALL, 18)])
@pytest.mark.parametrize("spec", ["h2o", "streaming_llm_original", "d2o", "cam:deterministic=true"])
def test_texts_that_fit_and_grow_past_the_budget(spec, lengths):
    """From the first eviction on it is as by hand, what is merged included."""
    by_layer = {"d2o": lambda one: [d2o_step(layer, SMALL) for layer in one.layers]}
    of_all = {"cam:deterministic=true": lambda one: cam_step(one, SMALL, 32)}
    by_head = {"h2o": h2o, "streaming_llm_original": first_and_newest}
    change = (by_layer | of_all).get(spec) or holding(by_head[spec], SMALL)
    assert_steps(spec, SMALL, 2, lengths, change, count=8)
