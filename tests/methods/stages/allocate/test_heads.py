# SPDX-License-Identifier: Apache-2.0
"""Entries per head: AdaKV's floor and blend in a layer, KVzip's pool over layers and heads."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.methods.stages.allocate.heads import adaptive
from kvfold.methods.stages.allocate.pool import pooled, whole_heads

NONE = -math.inf
FLOORS = st.sampled_from([0.0, 0.2, 0.3, 0.5, 1.0])
# Few different values, so that ties are the rule.
VALUES = st.sampled_from([NONE, 0.0, 0.25, 0.5, 1.0, 2.0])


@st.composite
def layers_and_sizes(draw, layers=1):
    """Scores `[B, H, T]` of one to `layers` layers, padding on the left, and sizes per head."""
    batch = draw(st.integers(1, 3))
    scores = []
    for _ in range(draw(st.integers(1, layers))):
        heads, stored = draw(st.integers(1, 4)), draw(st.integers(1, 7))
        size = batch * heads * stored
        flat = draw(st.lists(VALUES, min_size=size, max_size=size))
        layer = torch.tensor(flat, dtype=torch.float64).view(batch, heads, stored)
        for row in range(batch):
            layer[row, :, : draw(st.integers(0, stored))] = NONE
        scores.append(layer)
    sizes = draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
    return scores, torch.tensor(sizes)


def distinct(*shape, seed=0):
    """Scores of which no two are equal."""
    count = math.prod(shape)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return (order.double() + 1).view(shape) / count


def candidates(heads):
    return [(score, head) for head, row in enumerate(heads) for score in row if score > NONE]


def best(found, count):
    """The `count` highest of (score, head) pairs; of equal ones the earlier head."""
    return sorted(found, key=lambda pair: (-pair[0], pair[1]))[:count]


def per_head_of(pairs, heads):
    return [sum(1 for _, head in pairs if head == h) for h in range(heads)]


# --- AdaKV -------------------------------------------------------------------------------------

EXAMPLE = torch.tensor([[[0.9, 0.8, 0.7, 0.1], [0.6, 0.05, 0.04, 0.03]]])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"floor": 0.0}, [3, 1]),
        ({"floor": 0.5}, [3, 1]),
        ({"floor": 1.0}, [2, 2]),
        ({"floor": 0.5, "rule": "blend"}, [2, 2]),
        ({"floor": 0.2, "rule": "blend"}, [2, 1]),
        ({"floor": 0.0, "rule": "blend"}, [3, 1]),
    ],
)
def test_adakv_golden_vectors(options, expected):
    assert adaptive(EXAMPLE, torch.tensor([2]), **options).tolist() == [expected]


def naive_floor(heads, per_head, floor):
    kept = []
    for head, row in enumerate(heads):
        own = [(score, head) for score in row if score > NONE]
        kept += best(own, int(per_head * floor))
    left = candidates(heads)
    for pair in kept:
        left.remove(pair)
    kept += best(left, len(heads) * per_head - len(kept))
    return per_head_of(kept, len(heads))


def naive_blend(heads, per_head, floor):
    by_score = per_head_of(best(candidates(heads), len(heads) * per_head), len(heads))
    mixed = [round(count * (1 - floor) + int(per_head * floor)) for count in by_score]
    there = [sum(score > NONE for score in row) for row in heads]
    return [min(pair) for pair in zip(mixed, there, strict=True)]


@pytest.mark.parametrize(("rule", "naive"), [("floor", naive_floor), ("blend", naive_blend)])
@given(layers_and_sizes(), FLOORS)
@settings(max_examples=50, deadline=None)
def test_adaptive_is_the_naive_loop(rule, naive, drawn, floor):
    (scores,), sizes = drawn
    counts = adaptive(scores, sizes, floor=floor, rule=rule)
    assert counts.dtype == torch.int64
    rows = zip(scores.tolist(), sizes.tolist(), strict=True)
    assert counts.tolist() == [naive(heads, per_head, floor) for heads, per_head in rows]


@given(layers_and_sizes(), FLOORS)
@settings(max_examples=50, deadline=None)
def test_a_floor_is_met_and_the_sum_is_exact(drawn, floor):
    (scores,), sizes = drawn
    there = (scores > NONE).sum(-1)
    counts = adaptive(scores, sizes, floor=floor)
    wanted = (sizes * scores.shape[1]).minimum(there.sum(-1))
    assert counts.sum(-1).tolist() == wanted.tolist()
    assert (counts <= there).all()
    for row, per_head in enumerate(sizes.tolist()):
        assert (counts[row] >= there[row].clamp(max=int(per_head * floor))).all()


@pytest.mark.parametrize("rule", ["floor", "blend"])
def test_a_floor_of_one_is_uniform(rule):
    scores = distinct(3, 4, 20)
    counts = adaptive(scores, torch.tensor([5, 7, 20]), floor=1.0, rule=rule)
    assert counts.tolist() == [[5] * 4, [7] * 4, [20] * 4]


def test_heads_that_are_alike_get_the_same():
    scores = distinct(1, 1, 30).expand(1, 4, 30)
    for floor in (0.0, 0.2):
        assert adaptive(scores, torch.tensor([11]), floor=floor).tolist() == [[11] * 4]


@given(st.integers(0, 12), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_without_a_floor_no_other_shares_hold_more_than_the_chosen(per_head, seed):
    scores = distinct(1, 4, 12, seed=seed)[0]
    ordered = scores.sort(-1, descending=True).values
    chosen = adaptive(scores[None], torch.tensor([per_head]), floor=0.0)[0]
    held = sum(float(row[:count].sum()) for row, count in zip(ordered, chosen, strict=True))
    everything = sorted(scores.flatten().tolist(), reverse=True)
    assert held == pytest.approx(sum(everything[: 4 * per_head]))
    assert held >= float(ordered[:, :per_head].sum()) - 1e-6


def test_blending_misses_the_sum_by_half_the_heads_at_most():
    for seed in range(20):
        scores, per_head = distinct(1, 8, 40, seed=seed), torch.tensor([seed + 3])
        for floor in (0.2, 0.5):
            least = int(int(per_head) * floor)
            # What `int` takes off the floor is lost as well.
            lost = 8 * (int(per_head) * floor - least)
            counts = adaptive(scores, per_head, floor=floor, rule="blend")
            assert abs(int(counts.sum()) + lost - 8 * int(per_head)) <= 4 + 1e-9
            assert (counts >= least).all()


@pytest.mark.parametrize("rule", ["floor", "blend"])
def test_a_budget_for_everything_keeps_everything(rule):
    scores = distinct(2, 3, 6)
    scores[1, :, :2] = NONE
    counts = adaptive(scores, torch.tensor([6, 9]), rule=rule)
    assert counts.tolist() == [[6] * 3, [4] * 3]


def normalized(heads, per_head):
    weighed = []
    for row in heads:
        there = [score for score in row if score > NONE]
        whole = sum(there)
        weight = sum(sorted(there, reverse=True)[:per_head]) / whole if whole else 0.0
        weighed.append([score * weight if score > NONE else NONE for score in row])
    return weighed


@given(layers_and_sizes(), FLOORS)
@settings(max_examples=50, deadline=None)
def test_normalizing_weighs_heads_by_what_their_best_hold(drawn, floor):
    (scores,), sizes = drawn
    counts = adaptive(scores, sizes, floor=floor, normalize=True)
    rows = zip(scores.tolist(), sizes.tolist(), strict=True)
    expected = [naive_floor(normalized(heads, size), size, floor) for heads, size in rows]
    assert counts.tolist() == expected


def test_normalizing_gives_less_to_a_head_that_spreads_its_attention():
    # By score alone the flat head wins three places; its best two hold half of it.
    scores = torch.tensor([[[0.5, 0.5, 0.5, 0.5], [0.7, 0.3, 0.0, 0.0]]])
    assert adaptive(scores, torch.tensor([2]), floor=0.0).tolist() == [[3, 1]]
    assert adaptive(scores, torch.tensor([2]), floor=0.0, normalize=True).tolist() == [[2, 2]]


# --- KVzip, pairs ------------------------------------------------------------------------------


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


# --- KVzip, heads ------------------------------------------------------------------------------


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
