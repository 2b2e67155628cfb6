# SPDX-License-Identifier: Apache-2.0
"""KVzip's pool: one budget for all layers and heads, against naive loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.methods.stages.allocate.pool import pooled, whole_heads
from tests.helpers.head_scores import (
    NONE,
    best,
    candidates,
    distinct,
    layers_and_sizes,
    per_head_of,
)


def naive_pool(layers, per_head, strict):
    """Counts of one row; each layer is a list of heads, numbered on through all layers."""
    heads = [head for layer in layers for head in layer]
    found = candidates(heads)
    total = min(per_head * len(heads), len(found))
    kept = best(found, total)
    if strict and total < len(found):
        last = best(found, len(found))[max(total - 1, 0)][0]
        kept = [pair for pair in found if pair[0] > last]
    counts = iter(per_head_of(kept, len(heads)))
    return [[next(counts) for _ in layer] for layer in layers]


@pytest.mark.parametrize("strict", [False, True])
@given(layers_and_sizes(layers=4))
@settings(max_examples=50, deadline=None)
def test_the_pool_is_the_naive_loop(strict, drawn):
    scores, sizes = drawn
    counts = pooled(scores, sizes, strict=strict)
    assert [count.shape for count in counts] == [layer.shape[:2] for layer in scores]
    for row, per_head in enumerate(sizes.tolist()):
        expected = naive_pool([layer[row].tolist() for layer in scores], per_head, strict)
        assert [count[row].tolist() for count in counts] == expected


@given(layers_and_sizes(layers=4))
@settings(max_examples=50, deadline=None)
def test_the_pool_spends_exactly_its_total(drawn):
    scores, sizes = drawn
    spent = torch.cat(pooled(scores, sizes), 1).sum(-1)
    there = torch.cat([(layer > NONE).sum(-1) for layer in scores], 1).sum(-1)
    heads = sum(layer.shape[1] for layer in scores)
    assert spent.tolist() == (sizes * heads).minimum(there).tolist()


def test_equal_scores_go_to_the_earlier_layer_and_head():
    layers = [torch.ones(1, 2, 3), torch.ones(1, 2, 3)]
    assert torch.cat(pooled(layers, torch.tensor([2]))).tolist() == [[3, 3], [2, 0]]


@pytest.mark.parametrize("heads", [32, 7])
def test_strict_rounds_down_once_for_all_heads_as_the_released_threshold_does(heads):
    tokens, part = 485, 0.3
    scores = distinct(1, 1, heads, tokens)
    ordered = sorted(scores.flatten().tolist(), reverse=True)
    threshold = ordered[max(int(heads * tokens * part) - 1, 0)]
    per_head = torch.tensor([part * tokens], dtype=torch.float64)
    counts = pooled(list(scores), per_head, strict=True)
    assert torch.equal(torch.cat(counts), (scores > threshold)[0].sum(-1))
    assert sum(int(count.sum()) for count in counts) == {32: 4655, 7: 1017}[heads]


@pytest.mark.parametrize("per_head", [1, 5, 9])
def test_strict_keeps_one_less_where_no_two_are_equal(per_head):
    layers = list(distinct(3, 1, 4, 10))
    kept = sum(int(count.sum()) for count in pooled(layers, torch.tensor([per_head]), strict=True))
    assert kept == 12 * per_head - 1


def test_strict_keeps_everything_of_a_budget_for_everything():
    counts = pooled(list(distinct(3, 1, 4, 10)), torch.tensor([10]), strict=True)
    assert torch.cat(counts).eq(10).all()


def test_what_is_forced_wins_in_the_pool():
    layers = list(distinct(2, 1, 2, 5))
    for layer in layers:
        layer[..., :2] = math.inf
    assert torch.cat(pooled(layers, torch.tensor([2]))).eq(2).all()


def test_a_row_of_the_pool_does_not_see_the_others():
    layers = [distinct(3, 2, 8, seed=seed) for seed in range(3)]
    layers[0][1, :, :5] = NONE
    sizes = torch.tensor([2, 5, 3])
    together = pooled(layers, sizes, sizes)
    for row in range(3):
        alone = pooled([layer[row : row + 1] for layer in layers], sizes[row : row + 1])
        for layer, count in zip(alone, together, strict=True):
            assert layer[0].tolist() == count[row].tolist()


def test_kvzip_head_level_golden_vector():
    of_heads = distinct(32, 1, 8)
    expanded = list(of_heads[..., None].expand(32, 1, 8, 1000))
    counts = torch.cat(whole_heads(expanded, torch.tensor([600])))
    assert (counts == 1000).sum() == 153 and (counts == 0).sum() == 256 - 153
    # The same heads as by the official threshold over all their equal pairs.
    assert torch.equal(counts, torch.cat(pooled(expanded, torch.tensor([600]), strict=True)))
    assert of_heads[:, 0][counts == 1000].min() > of_heads[:, 0][counts == 0].max()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(0, 7), st.data())
@settings(max_examples=50, deadline=None)
def test_heads_are_kept_whole_or_not_at_all(layers, heads, stored, per_head, data):
    seed = data.draw(st.integers(0, 100))
    forced = data.draw(st.integers(0, stored))
    scores = list(distinct(layers, 1, heads, stored, seed=seed))
    for layer in scores:
        layer[..., :forced] = math.inf
    counts = torch.cat(whole_heads(scores, torch.tensor([per_head]))).flatten().tolist()
    rest = [max(head[forced:].tolist(), default=0) for layer in scores for head in layer[0]]
    room = layers * heads * (per_head - forced)
    if forced == stored:
        assert set(counts) == {stored}
        return
    number = min(max(room, 0) // (stored - forced), layers * heads)
    order = sorted(range(len(rest)), key=lambda i: -rest[i])
    whole = set(order[:number])
    assert counts == [stored if head in whole else forced for head in range(len(rest))]


def test_of_equal_heads_the_earlier_is_kept_and_padding_is_no_candidate():
    layer = torch.tensor([[[0.5, 0.1, 0.2], [0.1, 0.5, 0.3]]])
    padded = torch.cat([torch.full((1, 2, 2), NONE), layer], -1)
    for scores in ([layer, layer], [padded, layer]):
        counts = torch.cat(whole_heads(scores, torch.tensor([2])))
        assert counts.tolist() == [[3, 3], [0, 0]]


def naive_floor(layers, per_head, floor):
    """Counts of one row: each head's best by the floor, then the best of what is left."""
    heads = [
        sorted((s for s in head if s > NONE), reverse=True) for layer in layers for head in layer
    ]
    total = min(per_head * len(heads), sum(map(len, heads)))
    counts = [min(int(floor * per_head + 1e-9), len(head)) for head in heads]
    while sum(counts) < total:
        open_ = [i for i, head in enumerate(heads) if counts[i] < len(head)]
        counts[max(open_, key=lambda i: heads[i][counts[i]])] += 1
    made = iter(counts)
    return [[next(made) for _ in layer] for layer in layers]


@pytest.mark.slow
@pytest.mark.parametrize("floor", [0.25, 0.5, 1.0])
@given(layers_and_sizes(layers=4))
@settings(max_examples=30, deadline=None)
def test_every_head_keeps_its_floor_and_the_rest_is_pooled(floor, drawn):
    scores, sizes = drawn
    counts = pooled(scores, sizes, floor=floor)
    for row, size in enumerate(sizes.tolist()):
        expected = naive_floor([layer[row].tolist() for layer in scores], size, floor)
        assert [layer[row].tolist() for layer in counts] == expected
