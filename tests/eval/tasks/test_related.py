# SPDX-License-Identifier: Apache-2.0
"""Needles that depend on one another: read back from the text by a solver of its sentences."""

from __future__ import annotations

import re

import pytest

from tests.helpers.tasks import ALL, made

CODE = re.compile(r"[Tt]he code of (\w+) is (?:now )?(\d{5})\.")


def test_the_later_value_is_asked_for_and_the_earlier_one_is_wrong() -> None:
    for sample in made("needle_replaced", 12):
        (question,) = sample.questions
        (first, old), (second, new) = CODE.findall(sample.context)
        assert first == second and old != new and question.answers == (new,)
        assert question.text.endswith(f"What is the code of {first} now?")
        task = ALL["needle_replaced"]
        assert task.score(f" {new}, once {old}.", question).value == 1
        assert task.score(f" {old}, then {new}.", question).value == 0
        assert sample.metadata["distance"] > 0


def test_a_value_is_found_by_way_of_another_key() -> None:
    linked_first = set()
    for sample in made("needle_two_hops", 12):
        (question,) = sample.questions
        ((asked, known),) = re.findall(r"(\w+) has the same code as (\w+)\.", sample.context)
        codes = dict(CODE.findall(sample.context))
        assert len(codes) == 2 and question.answers == (codes[known],)
        assert asked not in codes and question.text.endswith(f"is the code of {asked}?")
        (wrong,) = set(codes.values()) - set(question.answers)
        assert ALL["needle_two_hops"].score(wrong, question).value == 0
        linked_first.add(sample.context.index("has the same") < sample.context.index(codes[known]))
    assert linked_first == {True, False}


@pytest.mark.parametrize("name", ["needle_replaced", "needle_two_hops"])
def test_the_sentences_stand_apart_at_the_depths_that_are_noted(name: str) -> None:
    for sample in made(name, 8, length=4000):
        where = {value: found.start() for found in CODE.finditer(sample.context)
                 for value in found.groups()[1:]}  # fmt: skip
        size, (answer,) = len(sample.context), sample.questions[0].answers
        depth, distance = sample.metadata["depth"], sample.metadata["distance"]
        assert abs(100 * where.pop(answer) / size - depth) < 6
        if name == "needle_replaced":
            (before,) = where.values()
        else:
            before = sample.context.index("has the same code")
        assert abs(abs(100 * before / size - depth) - distance) < 9


@pytest.mark.parametrize("name", ["needle_replaced", "needle_two_hops"])
def test_one_depth_leaves_room_for_all_sentences(name: str) -> None:
    assert {one.metadata["distance"] for one in made(name, 8, depths=1)} <= {50, 100}
