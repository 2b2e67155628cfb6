# SPDX-License-Identifier: Apache-2.0
"""ExpectedAttention: its published numbers, the mean that it stands for, and loops in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import Observation
from kvfold.kernels.query_moments import query_moments
from kvfold.methods.expected_attention import (
    ExpectedAttention,
    expected_attention,
    expected_logits,
)
from kvfold.observers.query_moments import QueryMomentsNeed
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import SHAPES, SINKS, Layer, adaptive, assert_prefill, best
from tests.helpers.caches import PADDED, positions, start
from tests.helpers.models import build, continuation
from tests.helpers.observations import QUERIES, T, observed
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import Reader

SCORES = [0.343118, 0.319681, 0.279000, 0.448818, 0.319982, 0.381325]
DAMPED = [0.380535, 0.359681, 0.322589, 0.496776, 0.357398, 0.426047]


def turned(vectors: Tensor, shift: Tensor) -> Tensor:
    """Rotary pairs (0, 2) and (1, 3), by `[B]` or `[B, n]` positions."""
    angles = shift.view(len(shift), 1, -1, 1) * torch.tensor([1.0, 0.01])
    a, b = vectors.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def with_moments(left: int = 0) -> Observation:
    """Eight entries after `left` columns of padding, and moments of all but two queries."""
    counted = (torch.arange(T) >= 2)[None]
    moments = query_moments(QUERIES[None, None], counted, covariance=True)
    return dataclasses.replace(
        observed(left=left),
        observed={QueryMomentsNeed: moments},
        rotate=turned,
        tokens_seen=torch.tensor([T]),
    )


@pytest.mark.parametrize(("epsilon", "expected"), [(0.0, SCORES), (0.02, DAMPED)])
@pytest.mark.parametrize("left", [0, 3])
def test_expected_attention(left, epsilon, expected):
    method = ExpectedAttention(future=4, sinks=2, epsilon=epsilon)
    scores = expected_attention(with_moments(left), method)[0, 0, left + 2 :]
    torch.testing.assert_close(scores, torch.tensor(expected), atol=2e-6, rtol=0)


@pytest.mark.slow
def test_the_logit_is_that_of_the_mean_weight_of_gaussian_queries():
    seen = dataclasses.replace(with_moments(), scale=0.8)
    future = seen.future_query_moments(4)
    drawn = torch.distributions.MultivariateNormal(
        future.mean[0, 0].double(), future.covariance[0, 0].double()
    )
    torch.manual_seed(0)
    weights = (drawn.sample((400_000,)) @ seen.keys[0, 0].double().T * 0.8).exp().mean(0)
    torch.testing.assert_close(
        expected_logits(seen, 4)[0, 0, 0].double(), weights.log(), atol=0.01, rtol=0
    )


# --- by loops, in float64 ------------------------------------------------------------------------


def rotation(position: int, size: int) -> Tensor:
    """Llama's rotation matrix `[D, D]` of a position: pairs (f, f + D/2)."""
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for f in range(size // 2):
        angle = torch.tensor(position * 10000.0 ** (-2 * f / size), dtype=torch.float64)
        a, b = f, f + size // 2
        matrix[a, a] = matrix[b, b] = angle.cos()
        matrix[b, a], matrix[a, b] = angle.sin(), -angle.sin()
    return matrix


def scores_by_hand(
    layer: Layer, future: int, epsilon: float = 0.0, covariance: bool = True, vnorm: bool = True
) -> list[list[float]]:
    """Scores of the entries after the sinks, head by head."""
    scores = []
    tokens, size = layer.query.shape[1:]
    mean_turn = sum(rotation(tokens + i, size) for i in range(future)) / future
    for h, head in enumerate(layer.heads):
        group, keys = len(layer.query) // len(layer.heads), head.keys[SINKS:]
        rows = []
        for q in range(h * group, (h + 1) * group):
            before = [rotation(-p, size) @ layer.query[q, p] for p in range(SINKS, tokens)]
            mean = sum(before) / len(before)
            spread = sum(torch.outer(x - mean, x - mean) for x in before) / len(before)
            mean, spread = mean_turn @ mean, mean_turn @ spread @ mean_turn.T
            logits = [layer.scale * float(mean @ k) for k in keys]
            if covariance:
                more = [layer.scale**2 / 2 * float(k @ spread @ k) for k in keys]
                logits = [a + b for a, b in zip(logits, more, strict=True)]
            rows.append(torch.tensor(logits, dtype=torch.float64).softmax(0))
        expected = sum(rows) / group + epsilon
        scores.append((expected * head.values[SINKS:].norm(dim=-1) if vnorm else expected).tolist())
    return scores


def keeping(share: bool, **options: Any) -> Callable[[list[Layer]], list[list[list[int]]]]:
    """What loops leave of each head: the sinks and the best others, as many as it may keep."""

    def keep(layers: list[Layer]) -> list[list[list[int]]]:
        slots = []
        for layer in layers:
            scores = scores_by_hand(layer, **options)
            sizes = [SMALL - SINKS] * len(scores)
            if share:
                sizes = adaptive(scores, SMALL - SINKS, 0.2)
            chosen = zip(scores, sizes, strict=True)
            slots.append([[*range(SINKS), *(SINKS + i for i in best(*head))] for head in chosen])
        return slots

    return keep


@pytest.mark.slow
@pytest.mark.cases(2)
@SHAPES
def test_expected_attention_by_hand(heads, lengths):
    assert_prefill("expected_attention:future=5", SMALL, heads, lengths, keeping(False, future=5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ("covariance=false", {"covariance": False}),
        ("vnorm=false", {"vnorm": False}),
        ("epsilon=0.1", {"epsilon": 0.1}),
    ],
)
def test_options_by_hand(options, changed):
    keep = keeping(False, future=5, **changed)
    assert_prefill(f"expected_attention:future=5,{options}", SMALL, 2, (64, 53), keep)


@pytest.mark.slow
@pytest.mark.cases(2)
@SHAPES
def test_a_budget_for_each_head_by_hand(heads, lengths):
    keep = keeping(True, future=5, epsilon=0.02)
    held = assert_prefill("expected_attention_ada:future=5", SMALL, heads, lengths, keep)
    if heads > 1:
        assert len({n for layer in held.stats().kept for n in layer[0]}) > 2


def kept_by(model: Any, spec: str) -> Any:
    """Kept columns of each layer, row and head, after prompts of different lengths."""
    return positions(start(model, spec, PADDED).cache)


@pytest.mark.slow
def test_the_preset_is_the_composition_with_adakv(model):
    preset, composed, plain = (
        kept_by(model, spec)
        for spec in (
            "expected_attention_ada",
            "expected_attention:epsilon=0.02 + adakv",
            "expected_attention:epsilon=0.02",
        )
    )
    assert preset == composed != plain


@pytest.mark.slow
@pytest.mark.parametrize(("family", "without"), [("gpt2", (0, 1, 2, 3)), ("smollm3", (3,))])
def test_layers_without_rope_expect_the_queries_that_were(family, without):
    near, far = (kept_by(build(family), f"expected_attention:future={n}") for n in (1, 512))
    assert [layer for layer in range(4) if near[layer] == far[layer]] == list(without)


@pytest.mark.slow
def test_a_loaded_context_goes_on_by_the_same_moments(tmp_path: Path) -> None:
    tokenizer, model = word_tokenizer(), build("llama", vocab_size=len(word_tokenizer()))
    spec = "expected_attention + every:interval=3"
    context = kvfold.compress(model, tokenizer, "sky sea " * 20, spec, SMALL)
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    more = continuation(1, 9).clamp(max=len(tokenizer) - 1)
    for mine, other in zip(context.cache.states, loaded.cache.states, strict=True):
        of_both = (each.observers[QueryMomentsNeed] for each in (mine, other))
        before, after = (each.moments for each in of_both)
        for name in ("count", "mean", "covariance"):
            assert torch.equal(getattr(before, name), getattr(after, name))
    for cache in (context.cache, loaded.cache):
        for token in more.split(1, 1):
            Reader(model, cache)(token)
    for layer in range(4):
        pairs = zip(
            context.cache.positions(layer)[0], loaded.cache.positions(layer)[0], strict=True
        )
        assert all(torch.equal(a, b) for a, b in pairs)
