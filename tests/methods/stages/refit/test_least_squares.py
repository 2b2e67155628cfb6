# SPDX-License-Identifier: Apache-2.0
"""Non-negative least squares beside scipy's idea of it: the conditions of optimality; and ridge."""

import pytest
import torch

from kvfold.methods.stages.refit.least_squares import (
    largest_eigenvalue,
    nonnegative,
    ridge_towards,
)


def noise(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [1, 2, 17, 80])
def test_weights_meet_the_conditions_of_optimality(count, seed):
    rows = noise(3 * count, count, seed=seed).abs() ** 3
    aim = rows @ noise(count, seed=seed + 50) + noise(3 * count, seed=seed + 90)
    normal, toward = rows.T @ rows, rows.T @ aim
    weights = nonnegative(normal, toward)
    slope = normal @ weights - toward
    size = toward.abs().max()
    assert bool((weights >= 0).all())
    assert bool((slope >= -1e-8 * size).all())
    assert float((slope * weights).abs().max()) <= 1e-7 * size * weights.max().clamp(min=1)


def test_all_weights_can_be_zero():
    normal = torch.eye(5, dtype=torch.float64)
    assert nonnegative(normal, -torch.ones(5, dtype=torch.float64)).tolist() == [0] * 5


def test_equal_columns_are_no_obstacle():
    column = noise(30, 1, seed=1).abs()
    rows = torch.cat([column, column, noise(30, 2, seed=2).abs()], 1)
    weights = nonnegative(rows.T @ rows, rows.T @ (3 * column[:, 0]))
    assert float((rows @ weights - 3 * column[:, 0]).norm()) < 1e-4


def test_the_largest_eigenvalue_is_that_of_torch():
    rows = noise(40, 9, seed=3).abs()
    normal = rows.T @ rows
    expected = torch.linalg.eigvalsh(normal)[-1]
    torch.testing.assert_close(largest_eigenvalue(normal), expected, rtol=1e-6, atol=0)


def test_ridge_draws_towards_the_start():
    rows, start = noise(20, 6, seed=4), noise(6, 3, seed=5)
    aim = noise(20, 3, seed=6)
    for ridge in (1e-9, 0.3, 1e9):
        held = torch.cat([rows, ridge**0.5 * torch.eye(6, dtype=rows.dtype)])
        expected = torch.linalg.lstsq(held, torch.cat([aim, ridge**0.5 * start])).solution
        toward = rows.T @ (aim - rows @ start)
        got = ridge_towards(start, rows.T @ rows, toward, torch.tensor(ridge))
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
