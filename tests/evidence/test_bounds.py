# SPDX-License-Identifier: Apache-2.0
"""Upper confidence bounds: by simulation the level holds, whatever the distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from docs.results.check.simulate import LOSSES
from kvfold.evidence.bounds import least_samples, upper_bound

RUNS = 2000


@pytest.mark.parametrize("samples", [1, 50, 100, 400])
@pytest.mark.parametrize("error", [0.1, 0.05])
@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_is_above_the_bound_as_seldom_as_said(name, error, samples):
    draw, mean = LOSSES[name]
    bounds = upper_bound(draw(np.random.default_rng(samples), (RUNS, samples)), error)
    failed = int((bounds < mean).sum())
    # Of a rate of `error` so many are seen once in 10,000 tries.
    assert failed <= binom.ppf(1 - 1e-4, RUNS, error)
    assert bounds.max() <= 1 and bounds.min() > 0


def test_a_bound_is_near_what_one_distribution_s_own_would_be():
    """Of coins with two sides, against the exact interval of a binomial distribution."""
    draws = (np.random.default_rng(0).random((200, 400)) < 0.1).astype(float)
    bounds = upper_bound(draws, 0.1)
    from scipy.stats import beta

    heads = draws.sum(-1)
    exact = beta.ppf(0.9, heads + 1, 400 - heads)
    assert np.median(bounds - exact) < 0.02


def test_a_bound_is_that_of_a_search_over_all_means():
    """The lowest mean at which the bets, written out, have won enough."""
    losses, error = np.random.default_rng(1).random(30) ** 3, 0.1

    def won(mean):
        wealth, most, total, spread = 1.0, 0.0, 0.5, 0.25
        for i, loss in enumerate(losses, 1):
            stake = min(1.0, math.sqrt(2 * math.log(1 / error) / (len(losses) * spread / i)))
            wealth *= 1 - stake * (loss - mean)
            most = max(most, wealth)
            total += loss
            spread += (loss - total / (1 + i)) ** 2
        return most > 1 / error

    grid = np.linspace(0, 1, 20001)
    expected = next(mean for mean in grid if won(mean))
    assert abs(float(upper_bound(losses, error)) - expected) < 1e-4


@pytest.mark.parametrize("error", [0.1, 0.05])
@pytest.mark.parametrize("bound", [0.5, 0.05, 0.01])
def test_the_fewest_samples_are_enough_and_one_less_is_not(bound, error):
    least = least_samples(bound, error)
    assert least is not None
    assert upper_bound(np.zeros(least), error) <= bound < upper_bound(np.zeros(least - 1), error)


def test_without_samples_nothing_is_said():
    assert upper_bound(np.zeros((3, 0)), 0.1).tolist() == [1, 1, 1]
    assert least_samples(0.0, 0.1) is None
