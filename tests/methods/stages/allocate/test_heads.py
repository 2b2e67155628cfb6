# SPDX-License-Identifier: Apache-2.0
"""Entries per head: AdaKV's floor and blend in a layer, KVzip's pool over layers and heads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.methods.stages.allocate.heads import adaptive
from tests.helpers.head_scores import (
    NONE,
    best,
    candidates,
    distinct,
    layers_and_sizes,
    per_head_of,
)

FLOORS = st.sampled_from([0.0, 0.2, 0.3, 0.5, 1.0])
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


@pytest.mark.slow
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
