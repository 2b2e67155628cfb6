# SPDX-License-Identifier: Apache-2.0
"""Statistics over prompts against plain numpy, and their bootstrap intervals."""

from __future__ import annotations

import numpy as np
import pytest

from kvfold.checks.summary import (
    RESAMPLES,
    bootstrapped,
    exp_mean_of,
    mean_of,
    quantile_of,
    ratio_of,
)

VALUES = [[0.1, 0.4, 0.2], [1.5], [0.0, 0.3, 0.0, 0.7]]
FLAT = np.concatenate([np.array(each) for each in VALUES])


def test_values_are_those_over_all_positions() -> None:
    assert bootstrapped(3, mean_of(VALUES)).value == pytest.approx(FLAT.mean())
    assert bootstrapped(3, exp_mean_of(VALUES)).value == pytest.approx(np.exp(FLAT.mean()))
    assert bootstrapped(3, quantile_of(VALUES, 0.99)).value == pytest.approx(
        np.quantile(FLAT, 0.99)
    )
    assert bootstrapped(3, ratio_of([3, 1, 2], [2, 2, 4])).value == pytest.approx(6 / 8)


def test_prompts_are_resampled_and_not_positions() -> None:
    drawn = np.random.default_rng(0).integers(3, size=(RESAMPLES, 3))
    means = [np.concatenate([VALUES[index] for index in row]).mean() for row in drawn]
    found = bootstrapped(3, mean_of(VALUES))
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))
    # Positions of one prompt do not narrow the interval.
    longer = bootstrapped(3, mean_of([each * 100 for each in ([0.1], [0.5], [0.9])]))
    assert longer.high - longer.low > 0.4


def test_resamples_are_made_in_blocks() -> None:
    """So that their positions fit into memory."""
    sizes: list[int] = []

    def statistic(drawn):
        sizes.append(len(drawn))
        return drawn.mean(-1)

    bootstrapped(7, statistic)
    assert sum(sizes[1:]) == 1000 and max(sizes) == 50
