# SPDX-License-Identifier: Apache-2.0
"""Descriptions of methods: options with their comments, and stages in words."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Literal

import pytest

import kvfold
from kvfold import Forced, Method, Observation, Stages, list_methods, parse
from kvfold.methods.description import (
    Option,
    in_words,
    observed,
    options,
    shortest,
    stages_of,
    steps,
)


def norms(observation: Observation, *, power: int) -> object:
    """Scores by a power.

    Not shown.
    """


@dataclass(frozen=True)
class Own(Method):
    power: int = 2  # exponent of the norm, 1 or more
    side: Literal["key", "value"] = "key"  # what is measured
    layers: tuple[int, ...] = (0, 1)
    sinks: int = 4

    def stages(self) -> Stages:
        return Stages(score=partial(norms, power=self.power), forced=Forced(sinks=self.sinks))


def test_options_have_the_comments_behind_them() -> None:
    assert options(Own) == [
        Option("power", "int", "2", "exponent of the norm, 1 or more"),
        Option("side", "key, value", "key", "what is measured"),
        Option("layers", "list of int", "0/1", ""),
        Option("sinks", "int", "4", ""),
    ]


@pytest.mark.parametrize("name", kvfold.list_methods())
def test_options_of_methods_all_say_what_they_are(name: str) -> None:
    cls = kvfold.list_methods()[name]
    found = options(cls)
    assert [option.name for option in found] == [field.name for field in dataclasses.fields(cls)]
    assert not [option.name for option in found if not option.about]


def test_steps_are_functions_with_options_and_first_paragraphs() -> None:
    found = {step.stage: step for step in steps(Own(power=3).stages())}
    assert list(found) == ["observe", "score", "allocate", "forced", "decode"]
    assert found["score"].function is norms and found["score"].options == (("power", "3"),)
    assert found["score"].about == "Scores by a power."
    assert found["forced"].about == "the first 4" and found["observe"].about == "nothing"
    assert found["decode"].about == "generated tokens on top"


def test_steps_of_an_encoding_and_of_a_method_that_only_merges() -> None:
    (packing,) = steps(parse("kivi:bits=2").stages())
    assert packing.stage == "encode" and dict(packing.options)["key_bits"] == "2"
    stages, alone = stages_of(parse("merge"))
    assert not alone and [step.stage for step in steps(stages)] == ["merge"]
    assert steps(parse("full").stages()) == []
    pruning = steps(parse("pyramidinfer").stages())
    assert [step.stage for step in pruning] == ["observe", "token pruning"]
    assert pruning[0].about == "the newest queries"


def test_stages_in_words() -> None:
    assert in_words(parse("h2o").stages()) == (
        "observes attention sums, uniform budgets, always keeps the newest 50% of the budget, "
        "holds its size"
    )
    assert in_words(parse("full").stages()) == "keeps every entry"
    assert observed(parse("kvzip").stages()) == "the text being repeated"
    assert observed(parse("kvzip:questions=a.txt").stages()) == "questions about the text"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kvzip:normalize=True", "kvzip_plus"),
        ("kvzip", "kvzip"),
        ("kvzip:normalize=True,chunk=500", "kvzip_plus:chunk=500"),
        ("simlayerkv:threshold=0.65,window=128", "simlayerkv_llama2:window=128"),
        ("snapkv:window=16", "snapkv:window=16"),
        ("snapkv:window=16 + kivi:bits=4", "snapkv:window=16 + kivi"),
        ("a_plugin:that=1", "a_plugin:that=1"),
        ("cut", "cut"),
    ],
)
def test_the_shortest_text_names_the_preset(text, expected):
    found = shortest(text)
    assert found == expected
    if text not in ("a_plugin:that=1", "cut"):
        assert parse(found) == parse(text)


@pytest.mark.parametrize("name", sorted(list_methods()))
def test_the_shortest_text_makes_the_same_method(name):
    assert parse(shortest(str(parse(name)))) == parse(name)
