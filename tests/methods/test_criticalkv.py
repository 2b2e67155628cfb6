# SPDX-License-Identifier: Apache-2.0
"""CriticalKV: half by score, half by score times the norm of the projected value, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.kernels.projected_norms import l1_norms
from kvfold.methods.criticalkv import in_two_stages
from kvfold.methods.observation import Observation
from kvfold.observers.stored import OutputNorms
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    SHAPES,
    WINDOW,
    Head,
    Keep,
    Layer,
    adaptive,
    assert_prefill,
    best,
    model_with,
    newest,
    votes,
)
from tests.helpers.observations import KEYS, QUERIES, VALUES, D, T, observed

ROW, COLUMN = torch.arange(D)[:, None], torch.arange(3)
PROJECTION = ((3 * ROW + 2 * COLUMN + ROW * COLUMN) % 5 - 2) / 2
Score = Callable[[Head], list[float]]


def golden(first: float) -> list[int]:
    """Slots of four entries, by the attention of the last query alone."""
    seen = observed()
    weight = PROJECTION.T[None]
    projected = Observation(
        seen.keys,
        seen.values,
        seen.positions,
        observed={OutputNorms: lambda v: l1_norms(v, weight)},
    )
    scores = (KEYS @ QUERIES[7] / 2).softmax(0)[None, None]
    none = torch.zeros(1, 1, T, dtype=torch.bool)
    counts = torch.tensor([[4]])
    slots = in_two_stages(projected, scores, none, seen.positions, counts, first, epsilon=1e-4)
    return slots[0, 0].tolist()


def test_criticalkv() -> None:
    norms = (VALUES @ PROJECTION).norm(p=1, dim=-1)
    torch.testing.assert_close(l1_norms(VALUES[None, None], PROJECTION.T[None])[0, 0], norms)
    assert norms.tolist() == [3.75, 3, 4.75, 4.5, 2.75, 7.25, 2, 3.75]
    assert golden(0.5) == [0, 1, 2, 5]
    assert golden(1.0) == [0, 1, 2, 7]
    # All by the product: .786, .419, .623, .394, .319, .789, .145, .508
    assert golden(0.0) == [0, 2, 5, 7]


def norms_of(layer: int, heads: int, head: int, values: Tensor, order: int) -> Any:
    """Mean norm over a group's query heads of what each value adds to the model's dimension."""
    attention = model_with(heads, "truth").model.layers[layer].self_attn
    weight, size = attention.o_proj.weight.detach(), values.shape[1]
    group = weight.shape[1] // size // heads
    norms = torch.zeros(len(values), dtype=torch.float64)
    for query_head in range(head * group, (head + 1) * group):
        columns = weight[:, query_head * size : (query_head + 1) * size]
        for at, value in enumerate(values):
            norms[at] += torch.linalg.vector_norm(columns @ value, order) / group
    return norms.tolist()


def mean(head: Head) -> list[float]:
    """Votes of the window's queries on average."""
    return [vote / head.rows[0, -WINDOW:].shape[0] for vote in votes(head)]


def critical(
    scores: list[float], norms: list[float], size: int, forced: list[int], epsilon: float
) -> list[int]:
    """Forced entries, then the best by score up to the first part, then the best by product."""
    kept = list(forced)
    order = [at for at in best(scores, len(scores)) if at not in forced]
    kept += order[: max(0, size // 2 - len(forced))]
    lowest = min(0.0, *scores)
    products = [(s - lowest + epsilon) * n for s, n in zip(scores, norms, strict=True)]
    return kept + [at for at in best(products, len(products)) if at not in kept][: size - len(kept)]


def keeping(
    score: Score,
    heads: int,
    window: int,
    order: int = 1,
    adapt: bool = False,
    epsilon: float = 1e-4,
) -> Keep:
    """What stays of each head by `score`, whose last `window` entries are forced."""

    def keep(layers: list[Layer]) -> list[list[list[int]]]:
        kept = []
        for index, layer in enumerate(layers):
            scores = [score(head) for head in layer.heads]
            sizes = [SMALL] * heads
            if adapt:
                sizes = [n + window for n in adaptive(scores, SMALL - window, 0.2)]
            kept.append([])
            for h, head in enumerate(layer.heads):
                padded = scores[h] + [0.0] * (len(head) - len(scores[h]))
                norms = norms_of(index, heads, h, head.values, order)
                forced = newest(head, window)
                kept[-1].append(critical(padded, norms, sizes[h], forced, epsilon))
        return kept

    return keep


@pytest.mark.slow
@SHAPES
@pytest.mark.parametrize(("norm", "order"), [("l1", 1), ("l2", 2)])
def test_the_second_half_goes_by_score_times_norm(norm, order, heads, lengths):
    spec = f"criticalkv:window={WINDOW},norm={norm}"
    assert_prefill(spec, SMALL, heads, lengths, keeping(mean, heads, WINDOW, order))


@pytest.mark.slow
@SHAPES
def test_the_preset_adds_epsilon_to_the_sum_of_32_queries(heads, lengths):
    """Of fewer queries a part of it."""
    kept = keeping(votes, heads, WINDOW, epsilon=1e-4 / 32 * WINDOW)
    assert_prefill(f"criticalkv_summed:window={WINDOW}", SMALL, heads, lengths, kept)


@pytest.mark.slow
@SHAPES
def test_after_snapkv_it_is_the_method_alone(heads, lengths):
    spec = f"snapkv:window={WINDOW} + criticalkv"
    assert_prefill(spec, SMALL, heads, lengths, keeping(mean, heads, WINDOW))


@pytest.mark.slow
@SHAPES
@pytest.mark.parametrize("scoring", ["snapkv", "adakv"])
def test_heads_get_their_sizes_by_the_first_score(scoring, heads, lengths):
    alone = {"adakv": f"adakv:window={WINDOW} + criticalkv"}
    spec = alone.get(scoring, f"snapkv:window={WINDOW} + adakv + criticalkv")
    held = assert_prefill(spec, SMALL, heads, lengths, keeping(mean, heads, WINDOW, adapt=True))
    kept = held.stats().kept
    assert heads == 1 or len({n for layer in kept for n in layer[0]}) > 1


@pytest.mark.slow
@SHAPES
def test_scores_below_zero_are_counted_from_the_lowest(heads, lengths):
    """Norms of keys score with minus: as a factor, a large norm of the value would evict."""

    def minus_norms(head: Head) -> list[float]:
        return (-head.keys.norm(dim=-1)).tolist()

    spec = "knorm:skip_layers=none + criticalkv"
    assert_prefill(spec, SMALL, heads, lengths, keeping(minus_norms, heads, 0))


def test_its_choice_differs_from_that_of_the_score_alone(model):
    ids = torch.arange(5, 69)[None]
    kept = []
    for spec in (f"snapkv:window={WINDOW}", f"snapkv:window={WINDOW} + criticalkv"):
        cache = kvfold.CompressedCache(model, spec, SMALL)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        kept.append([set(cache.positions(1)[0][head].tolist()) for head in range(2)])
    assert kept[0] != kept[1]
    for plain, critical_ in zip(*kept, strict=True):
        assert len(plain & critical_) >= SMALL // 2


def test_compositions_that_are_refused() -> None:
    with pytest.raises(kvfold.IllegalComposition, match="while decoding"):
        kvfold.parse("h2o + criticalkv").stages()
    with pytest.raises(kvfold.IllegalComposition, match="select stage"):
        kvfold.parse("chunkkv + criticalkv").stages()


@pytest.mark.parametrize("options", ["first=1.1", "first=-0.1", "epsilon=-1", "first=nan"])
def test_options_out_of_range_are_refused(options: str) -> None:
    option = options.partition("=")[0]
    with pytest.raises(kvfold.KvfoldError, match=f"criticalkv:{option} is .*, not "):
        kvfold.parse(f"criticalkv:{options}")
