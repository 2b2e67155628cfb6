# SPDX-License-Identifier: Apache-2.0
"""Upper confidence bounds of a mean loss, valid for every distribution and every number of samples.

By betting against a mean that is too high: Waudby-Smith & Ramdas, arXiv 2010.09686, section 4, in
the form of Bates et al., "Distribution-free, risk-controlling prediction sets", arXiv 2101.02703,
section 3.1.3.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from kvfold.evidence.intervals import Array

HALVINGS = 30  # of the interval that the bound is searched in: its error is below 1e-9
MOST = 2**20  # samples; a bound that needs more is out of reach


def upper_bound(losses: Array, error: float) -> Array:
    """Bounds `[...]` of the means of losses `[..., n]` in [0, 1], 1 where nothing can be said.

    Of independent samples of one distribution, whatever it is, the mean exceeds the bound with a
    probability of at most `error`. The samples' order counts, and must not depend on their losses.
    """
    n = losses.shape[-1]
    if n == 0:
        return np.ones(losses.shape[:-1])
    stakes, low = _stakes(losses, error), np.zeros(losses.shape[:-1])
    high = np.ones_like(low)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        # What a gambler would have won if the mean were this high; the logarithm, its highest.
        with np.errstate(divide="ignore"):
            wealth = np.log1p(-stakes * (losses - middle[..., None])).cumsum(-1).max(-1)
        beaten = wealth > -math.log(error)
        low, high = np.where(beaten, low, middle), np.where(beaten, middle, high)
    return high


def _stakes(losses: Array, error: float) -> Array:
    """Part of the wealth that is bet on each sample, from those before it."""
    n = losses.shape[-1]
    counts = np.arange(1, n + 1)
    means = (0.5 + losses.cumsum(-1)) / (1 + counts)
    spreads = (0.25 + np.square(losses - means).cumsum(-1)) / (1 + counts)
    before = np.concatenate([np.full((*losses.shape[:-1], 1), 0.25), spreads[..., :-1]], -1)
    stakes: Array = np.minimum(1, np.sqrt(2 * math.log(1 / error) / (n * before)))
    return stakes


@lru_cache(maxsize=64)
def least_samples(bound: float, error: float) -> int | None:
    """Fewest samples whose bound can be as low as `bound`, all losses 0; None if too many."""
    few, many = 0, 1
    while upper_bound(np.zeros(many), error) > bound:
        few, many = many, 2 * many
        if many > MOST:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        if upper_bound(np.zeros(middle), error) > bound:
            few = middle
        else:
            many = middle
    return many
