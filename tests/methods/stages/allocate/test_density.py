# SPDX-License-Identifier: Apache-2.0
"""D2O's budgets: from column sums to counts per layer, exact in sum."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold import BudgetError, KvfoldError
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.density import (
    as_released,
    by_density,
    column_variance,
    densities,
)
from kvfold.methods.stages.allocate.rounding import UNLIMITED
from kvfold.observers.column_sums import ColumnSums

EXACT = ["softmax", "uniform", "reciprocal"]
NORMS = ["across_layers", "official", "none"]
VARIANCES = st.floats(0, 10_000)


def observed(sums):
    """Rows of column sums for two heads; None is padding."""
    stored = max(len(row) for row in sums)
    rows = [[None] * (stored - len(row)) + row for row in sums]
    values = torch.tensor([[[-77.0 if x is None else x for x in row]] * 2 for row in rows])
    values[:, 1] *= 3
    positions = torch.tensor(
        [[[-1 if x is None else 5 + i for i, x in enumerate(r)]] for r in rows]
    )
    keys = torch.zeros(len(rows), 2, stored, 4)
    return Observation(keys, keys, positions.expand(-1, 2, -1), observed={ColumnSums: values})


def counts_of(statistics, budget, seen, **options):
    """One row: variances per layer and head → integers per layer."""
    per_layer = [torch.tensor([heads]) for heads in statistics]
    counts = by_density(per_layer, torch.tensor([budget]), torch.tensor([seen]), **options)
    assert all(c.shape == (1,) for c in counts)
    return [c.item() for c in counts]


# --- the statistic -----------------------------------------------------------------------------


def test_variance_golden_vector():
    variance = column_variance(observed([[1.393346, 1.205542, 0.401112]]))
    assert variance.tolist() == [pytest.approx([0.277818, 9 * 0.277818], abs=1e-5)]
    assert variance.dtype == torch.float32


@given(st.lists(st.lists(st.floats(0, 5000), min_size=1, max_size=40), min_size=1, max_size=3))
@settings(max_examples=50, deadline=None)
def test_variance_is_that_of_a_row_s_own_entries(sums):
    variance = column_variance(observed(sums))
    for row, own in zip(sums, variance, strict=True):
        mean = sum(row) / len(row)
        expected = sum((x - mean) ** 2 for x in row) / max(1, len(row) - 1)
        assert own[0].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_entries_that_are_gone_on_the_right_do_not_count_either():
    seen = observed([[1.0, 4.0, None, 7.0, None]])
    assert column_variance(seen)[0, 0].item() == pytest.approx(9.0)


# --- F -----------------------------------------------------------------------------------------


def test_official_density_golden_vector():
    heads = [[1.0, 3.0, 2.0], [10.0, 10.0, 10.0], [5.0, 6.0, 100.0]]
    found = densities([torch.tensor([h]) for h in heads], "official")
    assert found.flatten().tolist() == pytest.approx([0.5, 0.0, 0.336842], abs=1e-6)


def test_densities_across_layers_lie_between_0_and_1_in_each_row():
    layers = [torch.tensor([[1.0, 3.0], [7.0, 7.0]]), torch.tensor([[10.0, 2.0], [7.0, 7.0]])]
    layers.append(torch.tensor([[3.0, 3.0], [7.0, 7.0]]))
    assert densities(layers, "none").T.tolist() == [[2, 6, 3], [7, 7, 7]]
    assert densities(layers, "across_layers").T.tolist() == [[0, 1, 0.25], [0, 0, 0]]


# --- counts ------------------------------------------------------------------------------------


def test_softmax_golden_vector():
    counts = counts_of([[0.1], [0.2], [0.4], [0.8]], 200_000, 10**6, norm="none")
    golden = [0.254595, 0.230367, 0.188609, 0.126428]
    assert [count / 10**6 for count in counts] == pytest.approx(golden, abs=1.5e-6)
    assert sum(counts) == 800_000


def test_the_other_designs_of_the_paper_by_hand():
    variances = [[1.0], [2.0], [4.0]]
    assert counts_of(variances, 70, 1000, shape="uniform") == [70, 70, 70]
    assert counts_of(variances, 70, 1000, shape="reciprocal") == [120, 60, 30]
    # Min–max: 0, 1/3, 1.
    expected = [100, 100 * math.exp(-1 / 3), 100 * math.exp(-1)]
    counts = counts_of(variances, 100, 1000, shape="exponential")
    assert sum(counts) == math.floor(sum(expected))
    assert all(abs(c - e) < 1 for c, e in zip(counts, expected, strict=True))


def test_reciprocals_are_of_the_variance_itself_whatever_the_norm():
    for norm in NORMS:
        assert counts_of([[1.0], [3.0]], 60, 1000, shape="reciprocal", norm=norm) == [90, 30]
    assert counts_of([[0.0], [0.0]], 60, 1000, shape="reciprocal") == [60, 60]
    assert counts_of([[0.0], [4.0]], 60, 100, shape="reciprocal") == [100, 20]


@given(st.lists(VARIANCES, min_size=1, max_size=40), st.integers(1, 300), st.data())
@settings(max_examples=100, deadline=None)
def test_counts_are_exact_and_fall_with_variance(variances, seen, data):
    budget = data.draw(st.integers(1, 400))
    shape, norm = data.draw(st.sampled_from(EXACT)), data.draw(st.sampled_from(NORMS))
    counts = counts_of([[v, 2 * v] for v in variances], budget, seen, shape=shape, norm=norm)
    assert sum(counts) == budget * len(variances)
    assert min(counts) >= 0 and max(counts) <= max(seen, budget)
    if norm != "official":
        dense_first = [c for _, c in sorted(zip(variances, counts, strict=True))]
        assert all(b <= a + 1 for a, b in pairwise(dense_first))


@given(st.lists(VARIANCES, min_size=2, max_size=40), st.integers(20, 100))
@settings(max_examples=50, deadline=None)
def test_normed_softmax_spreads_by_e_at_most(variances, budget):
    counts = counts_of([[v] for v in variances], budget, 10**6)
    assert max(counts) <= math.e * (min(counts) + 1) + 1


@given(st.lists(VARIANCES, min_size=1, max_size=20), st.integers(1, 100), st.integers(101, 1000))
@settings(max_examples=50, deadline=None)
def test_exponential_decay_never_exceeds_the_budget(variances, budget, seen):
    counts = counts_of([[v] for v in variances], budget, seen, shape="exponential")
    assert max(counts) <= budget and sum(counts) <= budget * len(variances)


def test_what_overflows_is_shared_in_proportion():
    # softmax 0.507, 0.307, 0.186 of 240 would be 121.6: the layer has 100, the rest share 140.
    counts = counts_of([[0.0], [0.5], [1.0]], 80, 100, norm="none")
    share = 140 / (1 + math.exp(-0.5))
    assert counts == [100, round(share), round(140 - share)]
    # 220 over parts of 1, 1 and 0.61: equal layers stay equal, up to the rounding.
    assert counts_of([[0.0], [0.5], [0.5], [1.0]], 80, 100, norm="none") == [100, 85, 84, 51]


def test_raw_variances_saturate_layer_after_layer():
    assert counts_of([[900.0], [100.0], [500.0]], 50, 100, norm="none") == [0, 100, 50]


@pytest.mark.parametrize("shape", EXACT)
@pytest.mark.parametrize("norm", NORMS)
def test_each_row_is_its_own(shape, norm):
    generator = torch.Generator().manual_seed(0)
    layers = [torch.rand(3, 4, generator=generator) * 100 for _ in range(6)]
    budget, seen = torch.tensor([20, 90, 50]), torch.tensor([100, 100, 60])
    together = by_density(layers, budget, seen, norm=norm, shape=shape, skip_layers=(1,))
    for row in range(3):
        own = [layer[row : row + 1] for layer in layers]
        one = by_density(own, budget[[row]], seen[[row]], norm=norm, shape=shape, skip_layers=(1,))
        assert [c.item() for c in one] == [c[row].item() for c in together]


@pytest.mark.parametrize("budget", [100, 512])
def test_a_row_that_fits_is_shared_evenly(budget):
    variances = [[1.0], [50.0], [3.0]]
    assert counts_of(variances, budget, 100, skip_layers=(0, -1)) == [budget] * 3


# --- skipped layers ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", EXACT)
def test_skipped_layers_stay_whole_inside_the_total(shape):
    variances = [[float(v)] for v in (900, 5, 7, 3, 8, 0)]
    counts = counts_of(variances, 60, 100, shape=shape, skip_layers=(0, 1, -1))
    assert counts[:2] == [100, 100] and counts[-1] == 100
    assert sum(counts) == 360
    # The others share as if there were no skipped layers.
    assert counts[2:5] == counts_of(variances[2:5], 20, 100, shape=shape)


@pytest.mark.parametrize("skipped", [(0, 1, -1), (0, 1), (-1, -2, -3)])
def test_skipped_layers_that_take_everything_are_refused(skipped):
    with pytest.raises(BudgetError, match=r"whole layers of 100 tokens.*skip fewer layers"):
        counts_of([[1.0], [2.0], [3.0]], 60, 100, skip_layers=skipped)


@pytest.mark.parametrize("layer", [3, -4])
@pytest.mark.parametrize("budget", [60, 100])
def test_a_skipped_layer_that_there_is_not_is_refused(budget, layer):
    with pytest.raises(KvfoldError, match=f"d2o:skip_layers names layer {layer} of 3 "):
        counts_of([[1.0], [2.0], [3.0]], budget, 100, skip_layers=(0, layer))
    with pytest.raises(KvfoldError, match=f"d2o:skip_layers names layer {layer} of 3 "):
        released([[1.0]] * 3, budget / 100, 100, skipped=(0, layer))


# --- as released -------------------------------------------------------------------------------


def released(variances, part, seen, recent=0.5, skipped=(0, 1, -1)):
    per_layer = [torch.tensor([heads]) for heads in variances]
    budget = torch.tensor([part * seen], dtype=torch.float64)
    tokens = torch.tensor([seen])
    counts = as_released(per_layer, budget, tokens, recent=recent, skip_layers=skipped)
    return [int(count) for count in counts]


HEADS_OF_LAYERS = [[1.0, 3.0, 2.0], [10.0] * 3, [5.0, 6.0, 100.0], [0.0, 4.0, 4.0], [9.0, 8.0, 1.0]]


@pytest.mark.parametrize("part", [0.05, 0.1, 0.3])
def test_released_layers_keep_their_part_of_all_and_whole_ones_come_on_top(part):
    """F by hand: 0.5, 0, 0.336842, 0.666667, 0.625."""
    densest = [0.5, 0.0, 0.336842, 0.666667, 0.625]
    whole = sum(math.exp(-f) for f in densest)
    expected = [2 * int(700 * math.exp(-f) / whole * 5 * part * 0.5) for f in densest]
    assert released(HEADS_OF_LAYERS, part, 700, skipped=()) == expected
    counts = released(HEADS_OF_LAYERS, part, 700)
    assert counts == [UNLIMITED, UNLIMITED, *expected[2:4], UNLIMITED]


def test_released_parts_lie_between_a_hundredth_and_all():
    flat, steep = [[1.0, 1.0]] * 3, [[0.0, 1.0]] * 3
    assert released(flat + steep, 0.9, 100, skipped=())[:3] == [100] * 3
    assert released(flat, 0.001, 700, skipped=()) == [6] * 3


def test_a_row_that_fits_is_left_alone_as_released():
    assert released(HEADS_OF_LAYERS, 1.0, 100, skipped=()) == [100] * 5
