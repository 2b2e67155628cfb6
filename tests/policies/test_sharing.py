# SPDX-License-Identifier: Apache-2.0
"""The loss of one set for all heads, against loops over single queries in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvfold.policies import Kept, Prefill, policy, sharing_loss
from kvfold.policies.sharing import QUERIES
from tests.policies.test_method_policy import tensors


def by_hand(prefill: Prefill, sets: list[list[set[int]]], sink: float | None) -> list[float]:
    """Mean attention mass and output error of `sets[layer][KV head]`, query by query."""
    masses, errors = [], []
    for layer, heads in enumerate(sets):
        keys, values = prefill.keys[layer].double(), prefill.values[layer].double()
        queries = prefill.queries[layer].double()
        for head, query_rows in enumerate(queries):
            own = head // (len(queries) // len(keys))
            for back in range(1, min(QUERIES, queries.shape[1]) + 1):
                seen = prefill.tokens - back + 1
                logits = (keys[own, :seen] @ query_rows[-back] * prefill.scale).tolist()
                weights = [math.exp(x) for x in logits]
                extra = 0 if sink is None else math.exp(sink)
                stay = [t for t in range(seen) if t in heads[own]]
                total = sum(weights) + extra
                masses.append(sum(weights[t] for t in stay) / total)
                whole = sum(w * v for w, v in zip(weights, values[own], strict=False)) / total
                left = sum(weights[t] * values[own, t] for t in stay)
                left = left / (sum(weights[t] for t in stay) + extra)
                errors.append(float((left - whole).norm() / whole.norm()))
    return [sum(masses) / len(masses), sum(errors) / len(errors)]


@pytest.mark.parametrize("sink", [None, 0.5])
def test_mass_and_error_are_those_of_loops(sink: float | None) -> None:
    whole = tensors(4, 64)
    sinks = None if sink is None else [torch.full((8,), sink)] * whole.layers
    whole = replace(whole, queries=[q[:, -3:] for q in whole.queries], sink_logits=sinks)
    held = policy("keydiff").keep(whole, 20)
    shared = held.shared("votes")
    loss = sharing_loss(held, shared, whole)
    sets = [[set(head.tolist()) for head in layer] for layer in held.indices]
    one = [[set(shared.tolist())] * whole.heads] * whole.layers
    assert [loss.mass_own, loss.error_own] == pytest.approx(by_hand(whole, sets, sink), abs=1e-5)
    expected = by_hand(whole, one, sink)
    assert [loss.mass_shared, loss.error_shared] == pytest.approx(expected, abs=1e-5)
    inside = [len(head & set(shared.tolist())) for layer in sets for head in layer]
    assert loss.overlap == pytest.approx(sum(inside) / (20 * len(inside)))
    assert (loss.own, loss.shared) == (20, 20)


def test_one_set_loses_attention_where_heads_differ() -> None:
    whole = tensors(4, 150)
    held = policy("snapkv:window=8").keep(whole, 30)
    loss = sharing_loss(held, held.shared("mass"), whole)
    assert loss.overlap < 0.9 and loss.mass_shared < 0.9 * loss.mass_own


def test_the_union_loses_nothing() -> None:
    whole = tensors(4, 150)
    held = policy("snapkv:window=8").keep(whole, 30)
    loss = sharing_loss(held, held.shared("union"), whole)
    assert loss.overlap == 1 and loss.mass_shared >= loss.mass_own and loss.shared > 30


def test_without_queries_only_sets_are_compared() -> None:
    whole = replace(tensors(4, 64), queries=None)
    held = policy("keydiff").keep(whole, 20)
    loss = sharing_loss(held, held.shared(), whole)
    assert 0 < loss.overlap < 1
    assert loss.mass_own is loss.mass_shared is loss.error_own is loss.error_shared is None


def test_everything_kept_is_no_loss() -> None:
    whole = tensors(4, 64)
    held = Kept(
        tuple((torch.arange(64),) * whole.heads for _ in range(whole.layers)),
        64,
        (None,) * whole.layers,
        torch.zeros(64, dtype=torch.bool),
    )
    loss = sharing_loss(held, torch.arange(64), whole)
    assert loss.overlap == 1 and loss.mass_own == pytest.approx(1) == loss.mass_shared
    assert loss.error_own == pytest.approx(0, abs=1e-6) == loss.error_shared
