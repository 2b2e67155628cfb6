# SPDX-License-Identifier: Apache-2.0
"""Non-negative least squares beside the conditions of optimality; ridge."""

import pytest
import torch

from kvfold.interruption import interrupt_by
from kvfold.methods.stages.refit.least_squares import (
    largest_eigenvalue,
    nonnegative,
    ridge_towards,
)


def noise(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alone(normal, toward):
    every = torch.ones(1, len(toward), dtype=torch.bool)
    return nonnegative(normal[None], toward[None], every)[0]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [1, 2, 17, 80])
def test_weights_meet_the_conditions_of_optimality(count, seed):
    rows = noise(3 * count, count, seed=seed).abs() ** 3
    aim = rows @ noise(count, seed=seed + 50) + noise(3 * count, seed=seed + 90)
    normal, toward = rows.T @ rows, rows.T @ aim
    weights = alone(normal, toward)
    slope = normal @ weights - toward
    size = toward.abs().max()
    assert bool((weights >= 0).all())
    assert bool((slope >= -1e-8 * size).all())
    assert float((slope * weights).abs().max()) <= 1e-7 * size * weights.max().clamp(min=1)


def test_all_weights_can_be_zero():
    normal = torch.eye(5, dtype=torch.float64)
    assert alone(normal, -torch.ones(5, dtype=torch.float64)).tolist() == [0] * 5


def test_equal_columns_are_no_obstacle():
    column = noise(30, 1, seed=1).abs()
    rows = torch.cat([column, column, noise(30, 2, seed=2).abs()], 1)
    weights = alone(rows.T @ rows, rows.T @ (3 * column[:, 0]))
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


def test_problems_of_different_sizes_are_solved_as_alone():
    """The third one has no unknown; the steps that each takes are its own."""
    counts = [40, 23, 0, 1, 31]
    problems = []
    for number, count in enumerate(counts):
        rows = noise(3 * count + 1, count, seed=number).abs() ** 3
        problems.append((rows.T @ rows, rows.T @ noise(3 * count + 1, seed=number + 50)))
    normal = torch.zeros(len(counts), 40, 40, dtype=torch.float64)
    toward = torch.zeros(len(counts), 40, dtype=torch.float64)
    for number, (own, aim) in enumerate(problems):
        normal[number, : len(aim), : len(aim)], toward[number, : len(aim)] = own, aim
    real = torch.arange(40) < torch.tensor(counts)[:, None]
    weights = nonnegative(normal, toward, real)
    start, ridge = noise(len(counts), 40, 3, seed=9), torch.tensor([0.1, 1.0, 1.0, 2.0, 0.5])
    together = ridge_towards(start, normal, start, ridge.double())
    for number, (own, aim) in enumerate(problems):
        count = len(aim)
        torch.testing.assert_close(weights[number, :count], alone(own, aim), rtol=1e-7, atol=1e-9)
        assert not weights[number, count:].any()
        few = start[number, :count]
        expected = ridge_towards(few, own, few, ridge[number].double())
        torch.testing.assert_close(together[number, :count], expected)


def test_a_long_fit_can_be_ended_between_steps():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 60, 40, dtype=torch.float64, generator=generator)
    normal, toward = rows.mT @ rows, torch.randn(1, 40, dtype=torch.float64, generator=generator)
    real, asked = torch.ones(1, 40, dtype=torch.bool), []

    def second() -> None:
        asked.append(None)
        if len(asked) == 2:
            raise TimeoutError

    interrupt_by(second)
    try:
        with pytest.raises(TimeoutError):
            nonnegative(normal, toward, real)
    finally:
        interrupt_by(None)
    assert torch.isfinite(nonnegative(normal, toward, real)).all()
