# SPDX-License-Identifier: Apache-2.0
"""The cases that `make test` takes of a parametrised test."""

from __future__ import annotations

from itertools import product

from tests.helpers.budgets import METHODS
from tests.helpers.cases import EACH, covering, kind


def test_methods_that_differ_in_a_formula_or_a_number_are_of_one_kind() -> None:
    assert kind("snapkv:window=8") == kind("snapkv:window=16") == kind("pyramidkv")
    assert len({*map(kind, ("snapkv", "adakv", "h2o", "roco", "kivi", "think", "rkv"))}) == 7
    assert kind("llama") == "llama"


def test_few_cases_have_every_kind_and_every_value_and_mix_them() -> None:
    cases = [
        {"spec": spec, "name": name, "rows": rows}
        for spec, name, rows in product(METHODS, ["llama", "qwen3"], [1, 3])
    ]
    chosen = [cases[index] for index in covering(cases)]
    kinds = {kind(spec) for spec in METHODS}
    assert len(chosen) == len({kind(case["spec"]) for case in chosen}) == len(kinds)
    assert {(case["name"], case["rows"]) for case in chosen} == {
        *product(("llama", "qwen3"), (1, 3))
    }
    assert {cases[index]["spec"] for index in covering(cases, EACH)} == {*METHODS}
    three = covering(cases, 3)
    assert len(three) == 3 and {*three} < {*covering(cases)}
    assert covering(cases[:1], 8) == [0]
