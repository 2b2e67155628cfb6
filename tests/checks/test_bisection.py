# SPDX-License-Identifier: Apache-2.0
"""Bisection against exhaustive search."""

from __future__ import annotations

import random

import pytest

from kvfold.checks.certify import smallest

BUDGETS = [number / 40 for number in range(1, 38)]


@pytest.mark.parametrize("first", range(len(BUDGETS)))
def test_it_finds_what_exhaustive_search_finds(first: int) -> None:
    asked: list[float] = []

    def passes(budget: float) -> bool:
        asked.append(budget)
        return budget >= BUDGETS[first]

    assert smallest(BUDGETS, passes) == next(b for b in BUDGETS if b >= BUDGETS[first])
    assert len(asked) == len(set(asked)) <= 7


def test_nothing_is_found_where_the_largest_fails() -> None:
    assert smallest(BUDGETS, lambda budget: budget < 0.5) is None


def test_without_monotony_the_next_smaller_one_fails() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        passing = {budget: draw.random() < 0.5 for budget in BUDGETS} | {BUDGETS[-1]: True}
        found = smallest(BUDGETS, passing.__getitem__)
        assert found is not None and passing[found]
        place = BUDGETS.index(found)
        assert place == 0 or not passing[BUDGETS[place - 1]]
