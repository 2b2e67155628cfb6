# SPDX-License-Identifier: Apache-2.0
"""The test of a mean that may be looked at at any time: its level holds, and it sees a drift."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from docs.results.check.drift import DRAWS, ERROR, TOLERANCE, delays, false_alarms
from kvfold.evidence.sequential import SequentialTest


@pytest.mark.parametrize("name", DRAWS)
def test_false_alarms_stay_below_the_level_however_often_one_looks(name):
    runs = 100
    # Of a rate of the level so many are seen once in 10,000 tries.
    most = binom.ppf(1 - 1e-4, runs, ERROR) / runs
    assert false_alarms(DRAWS[name], runs, 2000) <= most


@pytest.mark.parametrize("name", DRAWS)
def test_a_drift_is_seen_also_after_good_times(name):
    found = delays(DRAWS[name], 400, 40)
    assert len(found) > 35
    assert np.median(found) <= 130 and np.quantile(found, 0.95) <= 300


def test_the_expected_wealth_never_grows_at_the_tolerance():
    """By all sequences of a coin: a martingale, so that Ville's inequality gives the level."""
    tests = [(1.0, SequentialTest.of(0.3, 0.1))]
    for _ in range(10):
        tests = [
            (part * chance, test.after(loss))
            for part, test in tests
            for loss, chance in ((1.0, 0.3), (0.0, 0.7))
        ]
        assert math.isclose(sum(p * math.exp(test.log_wealth) for p, test in tests), 1)
    assert max(test.log_wealth for _, test in tests) > 1  # it has bet


def test_a_rejection_stays():
    test = SequentialTest.of(TOLERANCE, ERROR)
    for _ in range(20):
        test = test.after(1.0)
    assert test.rejected and test.mean == 1 and test.log_wealth > -math.log(ERROR)
    for _ in range(3000):
        test = test.after(0.0)
    assert test.rejected and test.samples == 3020 and math.isclose(test.mean, 20 / 3020)


def test_low_losses_are_never_bet_on():
    test = SequentialTest.of(TOLERANCE, ERROR)
    for _ in range(100):
        test = test.after(0.01)
    assert test.stake == test.log_wealth == 0 and not test.rejected
