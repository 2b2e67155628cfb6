# SPDX-License-Identifier: Apache-2.0
"""What is planned, and what samples come to: formulas by hand, a bootstrap in plain python."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from scipy.stats import binomtest

from kvfold.eval.run.cell_result import PERPLEXITY, breakdown, difference, estimate
from tests.helpers.eval_results import cell, lines, text
from tests.helpers.evaluation import outcome


def test_a_mean_of_equal_samples_has_the_usual_standard_error():
    values = [1.0, 0.0, 0.25, 1.0, 0.5]
    found = estimate([outcome(value) for value in values], "m")
    assert found.value == pytest.approx(100 * statistics.mean(values))
    assert found.error == pytest.approx(100 * statistics.stdev(values) / math.sqrt(5))


def test_questions_about_one_context_are_one_sample():
    grouped = estimate([outcome(1, 0), outcome(1, 1), outcome(0, 0)], "m")
    means = [0.5, 1.0, 0.0]
    assert grouped.value == pytest.approx(100 * statistics.mean(means))
    assert grouped.error == pytest.approx(100 * statistics.stdev(means) / math.sqrt(3))


def test_weights_count_in_the_mean_and_in_its_error():
    values, weights = [0.2, 0.9, 0.4], [1.0, 3.0, 2.0]
    found = estimate([outcome(v, weights=(w,)) for v, w in zip(values, weights, strict=True)], "m")
    total = sum(weights)
    mean = sum(v * w for v, w in zip(values, weights, strict=True)) / total
    # The ratio estimator: n/(n − 1) Σ w² (x − mean)² / (Σ w)².
    squares = sum((w * (v - mean)) ** 2 for v, w in zip(values, weights, strict=True))
    assert found.value == pytest.approx(100 * mean)
    assert found.error == pytest.approx(100 * math.sqrt(1.5 * squares) / total)
    inside = estimate([outcome(0.2, 0.8, weights=(1, 3))], "m")
    assert inside.value == pytest.approx(100 * (0.2 + 3 * 0.8) / 4)
    assert inside.error is None


def test_perplexity_is_the_exponential_of_the_mean_over_tokens():
    nlls, counts = [1.0, 2.0, 1.5], [100, 50, 10]
    found = estimate([text(n, c) for n, c in zip(nlls, counts, strict=True)], PERPLEXITY)
    mean = (100 + 100 + 15) / 160
    assert found.value == pytest.approx(math.exp(mean))
    squares = sum((c * (n - mean)) ** 2 for n, c in zip(nlls, counts, strict=True))
    # d exp(x) = exp(x) dx
    assert found.error == pytest.approx(math.exp(mean) * math.sqrt(1.5 * squares) / 160)


def test_samples_that_all_scored_the_same_leave_an_interval():
    right = {i: outcome(1) for i in range(20)}
    found = estimate(list(right.values()), "m")
    # Clopper and Pearson: 20 of 20.
    least = 100 * 0.025 ** (1 / 20)
    assert (found.value, found.error, found.high) == (100, 0, 100)
    assert found.low == pytest.approx(least) == pytest.approx(83.2, abs=0.05)
    apart = difference(right, right, "m")
    assert (apart.value, apart.samples, apart.worse, apart.better) == (0, 20, 0, 0)
    assert (apart.low, apart.high) == (pytest.approx(least - 100), pytest.approx(100 - least))
    assert estimate([outcome(1)], "m").low == pytest.approx(2.5)


def test_perplexities_of_equal_texts_do_not_differ():
    """Log-likelihoods are equal to the last digit only where nothing was lost."""
    generator = random.Random(0)
    texts = {i: text(generator.random(), i + 1) for i in range(30)}
    found = difference(texts, texts, PERPLEXITY)
    assert (found.value, found.low, found.high) == (0, 0, 0)


def test_a_difference_is_that_of_the_samples_that_both_have():
    ours = {0: outcome(0.5), 1: outcome(1.0), 2: outcome(0.0), 9: outcome(1.0)}
    full = {0: outcome(1.0), 1: outcome(1.0), 2: outcome(0.25), 3: outcome(0.0)}
    found = difference(ours, full, "m")
    assert found.value == pytest.approx(100 * (1.5 - 2.25) / 3)
    assert (found.samples, found.worse, found.better) == (3, 2, 0)
    assert difference({0: outcome(1)}, {1: outcome(1)}, "m") is None


@pytest.mark.parametrize(("right", "count"), [(0, 20), (1, 20), (19, 20), (50, 100), (3, 7)])
def test_the_interval_of_yes_and_no_is_clopper_and_pearsons(right, count):
    found = estimate([outcome(float(i < right)) for i in range(count)], "m")
    exact = binomtest(right, count).proportion_ci(method="exact")
    assert (found.low, found.high) == pytest.approx((100 * exact.low, 100 * exact.high))


@pytest.mark.parametrize("metric", ["m", PERPLEXITY])
def test_the_interval_of_many_samples_is_that_of_a_bootstrap_in_plain_python(metric):
    generator = random.Random(1)
    count = 200
    values = [
        (generator.random(), generator.random(), generator.randint(1, 5)) for _ in range(count)
    ]
    make = text if metric == PERPLEXITY else lambda a, w: outcome(a, weights=(w,))
    ours = {i: make(a, w) for i, (a, _, w) in enumerate(values)}
    full = {i: make(b, w) for i, (_, b, w) in enumerate(values)}

    def apart(rows: list[int]) -> float:
        total = sum(values[i][2] for i in rows)
        one, other = (sum(values[i][k] * values[i][2] for i in rows) / total for k in (0, 1))
        return 100 * (one - other) if metric == "m" else math.exp(one) - math.exp(other)

    drawn = sorted(apart(generator.choices(range(count), k=count)) for _ in range(1000))
    found = difference(ours, full, metric)
    width = drawn[974] - drawn[24]
    assert found.value == pytest.approx(apart(list(range(count))))
    assert found.low == pytest.approx(drawn[24], abs=0.12 * width)
    assert found.high == pytest.approx(drawn[974], abs=0.12 * width)
    assert found.low < found.value < found.high


def test_paired_samples_say_more_than_independent_ones():
    generator = random.Random(2)
    hard = [generator.random() * 0.8 for _ in range(50)]
    ours = {i: outcome(x) for i, x in enumerate(hard)}
    full = {i: outcome(x + 0.1 + 0.02 * generator.random()) for i, x in enumerate(hard)}
    found = difference(ours, full, "m")
    alone = estimate(list(ours.values()), "m")
    assert found.high < 0 and found.high - found.low < 0.6 * (alone.high - alone.low)
    assert found.worse == 50


def test_scores_are_broken_down_by_depth_and_by_turn():
    depths = [0.0, 50.0, 0.0, 50.0, None]
    answers = [(1, 0), (0, 0), (0.5, 1), (1, 0), (0, 1)]
    made = lines(cell(), [outcome(*each) for each in answers], depth=depths, words=range(5))
    found = breakdown(made, "m")
    assert set(found) == {"depth", "turn"}
    assert {k: v.value for k, v in found["depth"].items()} == {"0.0": 62.5, "50.0": 25}
    assert found["turn"]["1"].value == pytest.approx(100 * 2.5 / 5)
    assert found["turn"]["2"].value == pytest.approx(100 * 2 / 5)
    firsts = [each[0] for each in answers]
    assert found["turn"]["1"].error == pytest.approx(100 * statistics.stdev(firsts) / math.sqrt(5))
    alike = lines(cell(), [outcome(1), outcome(0)], depth=[0, 0])
    assert breakdown(alike, "m") == {}


def test_a_perplexity_beyond_all_numbers_is_a_number():
    found = estimate([text(900.0, 1), text(800.0, 1)], PERPLEXITY)
    assert found.high == found.value > 1e100 and math.isfinite(found.error)
