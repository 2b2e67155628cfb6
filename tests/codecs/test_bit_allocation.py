# SPDX-License-Identifier: Apache-2.0
"""KVTC's bits by dynamic programming beside all plans, and kvfold's one step beside them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvfold.codecs import symbols
from tests.helpers.bit_allocation import OF_SCALE, RAW, Group, Plan, allocate, rounded

GOLDEN = [
    [4, 1, 0.5, 0.1],
    [-3, 1.5, -0.5, 0.1],
    [2, -2, 0.25, 0],
    [-5, 0.5, -0.75, -0.1],
    [1, -1, 1, 0.2],
]


@pytest.mark.parametrize(
    "budget, groups, error",
    [
        (16, [(1, 16)], 10.695),
        (32, [(2, 16)], 2.195),
        (40, [(4, 2)], 1.916111),
        (48, [(1, 16), (2, 16)], 0.07),
        (64, [(4, 16)], 0),
    ],
)
def test_golden_plans(budget, groups, error):
    found = allocate(np.array(GOLDEN), budget, (1, 2, 4), (16, 8, 4, 2))
    assert list(found.groups) == groups and found.cost <= budget
    assert found.error == pytest.approx(error, abs=1e-6)


def every_plan(count: int, most: int = RAW) -> Iterator[tuple[Group, ...]]:
    """All groups of up to `count` directions, none more precise than the one before."""
    yield ()
    for width in (1, 2, 3):
        for bits in (16, 4, 2):
            if width <= count and bits <= most:
                for rest in every_plan(count - width, bits):
                    yield Group(width, bits), *rest


@pytest.mark.parametrize("budget", [0, 40, 75, 100, 200])
def test_no_plan_within_the_budget_is_better(budget):
    given = np.random.default_rng(0).normal(size=(20, 6)) * np.exp(-np.arange(6) / 2)
    errors = []
    for groups in every_plan(6):
        if sum(group.cost for group in groups) > budget:
            continue
        made, start = np.zeros_like(given), 0
        for width, bits in groups:
            made[:, start : start + width] = rounded(given[:, start : start + width], bits)
            start += width
        errors.append(np.square(made - given).sum())
    assert allocate(given, budget, (1, 2, 3), (16, 4, 2)).error == pytest.approx(min(errors))


def coefficients(tokens: int = 1500, count: int = 32) -> np.ndarray:
    generator = np.random.default_rng(1)
    return generator.normal(size=(tokens, count)) * np.exp(-np.arange(count) / 8)


def coded(given: np.ndarray, plan: Plan) -> tuple[np.ndarray, list[torch.Tensor], int]:
    """Numbers of a plan, its integer codes by direction, and the bytes beside them."""
    made, codes, start, beside = np.zeros_like(given), [], 0, 0
    for width, bits in plan.groups:
        part = given[:, start : start + width]
        made[:, start : start + width] = rounded(part, bits)
        if bits == RAW:
            beside += part.size * RAW // 8
        else:
            low, high = part.min(1, keepdims=True), part.max(1, keepdims=True)
            whole = np.round((part - low) / (high - low) * (2**bits - 1)) - 2 ** (bits - 1)
            codes += list(torch.from_numpy(whole.T.copy()))
            beside += len(part) * OF_SCALE // 8
        start += width
    return made, codes, beside


@pytest.mark.parametrize("budget", [40, 72, 100, 140])
def test_the_cost_of_a_plan_is_its_bytes_before_entropy_coding(budget):
    given = coefficients()
    plan = allocate(given, budget, (1, 8, 16), (16, 8, 4, 3, 2))
    made, codes, beside = coded(given, plan)
    bits = [group.bits for group in plan.groups if group.bits != RAW for _ in range(group.width)]
    packed = [
        np.packbits(((each.numpy().astype(int) + 2 ** (n - 1))[:, None] >> np.arange(n)) & 1)
        for each, n in zip(codes, bits, strict=True)
    ]
    assert beside + sum(map(len, packed)) == pytest.approx(
        plan.cost * len(given) / 8, abs=len(bits)
    )
    assert np.square(made - given).sum() == pytest.approx(plan.error)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("budget", [40, 72, 100, 140])
def test_one_step_is_better_than_a_plan_of_as_many_bytes(budget):
    """Both entropy-coded: the error of kvtc's step is less than 0.6 of the plan's."""
    given = coefficients()
    made, codes, beside = coded(given, allocate(given, budget, (1, 8, 16), (16, 8, 4, 3, 2)))
    nbytes, step = beside + symbols.encode(codes).nbytes, 1e-2
    numbers = torch.from_numpy(given.T.copy())
    while symbols.encode(list((numbers / step).round())).nbytes > nbytes:
        step *= 1.1
    ours = float(((numbers / step).round() * step - numbers).square().sum())
    assert ours < 0.6 * np.square(made - given).sum()
