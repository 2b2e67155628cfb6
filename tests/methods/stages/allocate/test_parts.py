# SPDX-License-Identifier: Apache-2.0
"""Sizes by given parts: one largest remainder inside bounds, rows, and files that are refused."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import save_file

from kvfold import KvfoldError
from kvfold.methods.stages.allocate.parts import (
    Curve,
    PartsFile,
    bounds,
    by_parts,
    proportional_within,
)
from tests.helpers.observations import observe


def sizes(weights: list[float], total: int, least: list[int], most: list[int]) -> list[int]:
    tensors = (torch.tensor(each, dtype=torch.float64) for each in (weights, least, most))
    given, fewest, largest = tensors
    return proportional_within(given, total, fewest, largest)


def test_rounding_of_the_published_example() -> None:
    assert sizes([0.13, 0.42, 0.25, 0.71], 15, [1] * 4, [10] * 4) == [1, 4, 3, 7]


def test_what_bounds_add_or_take_is_shared_in_proportion() -> None:
    assert sizes([1, 1, 2], 20, [0, 0, 0], [20, 20, 7]) == [7, 6, 7]
    assert sizes([1, 3, 6], 20, [5, 0, 0], [20, 20, 20]) == [5, 5, 10]
    assert sizes([0, 1], 12, [0, 0], [10, 10]) == [2, 10]  # a part of 0 takes what has no room
    assert sizes([1, 1], 3, [4, 4], [9, 9]) == [4, 4]
    assert sizes([1, 1], 30, [4, 4], [9, 9]) == [9, 9]


@pytest.mark.slow
def test_the_total_is_met_and_no_head_is_off_by_one() -> None:
    draw = random.Random(0)
    for _ in range(200):
        heads = draw.randint(1, 12)
        weights = [draw.random() ** 3 for _ in range(heads)]
        least = [draw.randint(0, 5) for _ in range(heads)]
        most = [low + draw.randint(0, 60) for low in least]
        total = draw.randint(sum(least), sum(most))
        found = sizes(weights, total, least, most)
        assert sum(found) == total
        assert all(a <= n <= b for a, n, b in zip(least, found, most, strict=True))
        free = [i for i in range(heads) if least[i] + 1 < found[i] < most[i] - 1]
        for i in free:  # in proportion, up to rounding
            for j in free:
                assert found[i] - 1 <= (found[j] + 1) * weights[i] / weights[j] + 1e-6


def test_parts_between_two_rows_are_interpolated() -> None:
    parts = torch.tensor([[[0.1, 0.3]], [[0.5, 0.3]]])
    curve = Curve(torch.tensor([0.2, 0.4]), parts)
    for budget, expected in [(0.1, [0.1, 0.3]), (0.3, [0.3, 0.3]), (0.35, [0.4, 0.3])]:
        found = curve.at(budget)[0]
        torch.testing.assert_close(found, torch.tensor(expected).double(), atol=1e-7, rtol=0)
    assert torch.equal(curve.at(0.9), parts[1].double())


def test_bounds_are_the_forced_entries_and_all() -> None:
    seen = observe((20, 5))
    assert bounds(seen).tolist() == [[[0, 20]] * 2, [[0, 5]] * 2]


def test_layers_meet_the_budget_of_each_row() -> None:
    seen = [observe((20, 10)) for _ in range(3)]
    curve = Curve(torch.tensor([0.4]), torch.tensor([[[0.2], [0.4], [0.6]]]))
    tokens, budget = torch.tensor([20, 10]), torch.tensor([8.0, 4.0]).double()
    found = by_parts([bounds(each) for each in seen], budget, tokens, parts=curve)
    assert [size.tolist() for size in found] == [[4, 2], [8, 4], [12, 6]]


@pytest.mark.parametrize("kind", ["json", "safetensors"])
def test_files_of_layers_heads_and_rows(tmp_path, kind) -> None:
    layers, heads = [0.1, 0.3], [[0.1, 0.2, 0.3], [0.3, 0.4, 0.5]]
    rows = {"budgets": [0.3, 0.6], "parts": [heads, [[0.6] * 3, [0.6] * 3]]}
    for given, shape in [(layers, (1, 2, 1)), (heads, (1, 2, 3)), (rows, (2, 2, 3))]:
        path = tmp_path / f"a.{kind}"
        if kind == "json":
            path.write_text(json.dumps(given))
        else:
            named = given if isinstance(given, dict) else {"parts": given}
            save_file({name: torch.tensor(each) for name, each in named.items()}, path)
        curve = PartsFile(str(path)).read()
        assert tuple(curve.parts.shape) == shape and len(curve.budgets) == shape[0]
        curve.check("a", 2, 3)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("[0.1, 0.2, 0.3]", "parts of 3 layers, and this model compresses 2"),
        ("[[0.1, 0.2], [0.1, 0.2]]", "parts of 2 KV heads, and a layer of this model has 3"),
        ("[0.1, 1.5]", "not from 0 to 1"),
        ("[0.1, -0.5]", "not from 0 to 1"),
        ("[0.1, NaN]", "not from 0 to 1"),
        ("[0, 0]", "keeps nothing"),
        ('{"budgets": [0.5, 0.2], "parts": [[[1], [1]], [[1], [1]]]}', "do not ascend"),
        ('{"budgets": [0.5], "parts": [[[1], [1]], [[1], [1]]]}', "R budgets is wanted"),
        ('{"budgets": [0.5]}', "cannot read"),
        ("[[0.1], [0.2, 0.3]]", "cannot read"),
        ("0.5", "is wanted"),
        ("[]", "is wanted"),
        ("half", "cannot read"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, given, why) -> None:
    path = tmp_path / "a.json"
    path.write_text(given)
    with pytest.raises(KvfoldError, match=why):
        PartsFile(str(path)).read().check(str(path), 2, 3)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path) -> None:
    (tmp_path / "a.json").write_text("[0.1, 0.3]", encoding="utf-8-sig")
    assert PartsFile(str(tmp_path / "a.json")).read().parts.flatten().tolist() == [0.1, 0.3]


def test_a_file_that_is_not_there_is_refused(tmp_path) -> None:
    with pytest.raises(KvfoldError, match="cannot read"):
        PartsFile(str(tmp_path / "none.json")).read()
    with pytest.raises(KvfoldError, match="name it, sizes:file=FILE"):
        PartsFile("none").read()
