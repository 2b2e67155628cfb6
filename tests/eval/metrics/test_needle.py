# SPDX-License-Identifier: Apache-2.0
"""Needles: ROUGE takes wrong answers for right ones, keywords do not."""

import pytest

from kvfold.eval.metrics import needle
from kvfold.eval.tasks.needle import SANDWICH
from tests.helpers.metrics import value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prediction", "rouge_1", "right"),
    [
        ("eat a sandwich and sit in Dolores Park on a sunny day.", 7.27, 1),
        (
            "The best thing to do in San Francisco is to visit Golden Gate Park on a sunny day.",
            7.18,
            0,
        ),
        ("Eat a sandwich and sit in Dolores Park.", 5.52, 1),
    ],
)
def test_rouge_takes_a_wrong_answer_for_a_right_one_and_keywords_do_not(prediction, rouge_1, right):
    assert 10 * value(needle.rouge_1(prediction, SANDWICH.text)) == pytest.approx(
        rouge_1, abs=0.006
    )
    assert value(needle.keywords(prediction, SANDWICH.keywords)) == right


def test_both_rouges_of_a_needle_itself_are_1():
    assert value(needle.rouge_1(SANDWICH.text, SANDWICH.text)) == 1
    assert value(needle.rouge_l(SANDWICH.text, SANDWICH.text)) == pytest.approx(1)


@pytest.mark.parametrize(
    "said",
    [
        "48213",
        "It is 48,213.",
        "48.213 Euro",
        "48 213",
        "48\u202f213",
        "48\u2009213",
        "٤٨٬٢١٣",
        "7, 48213",
        "４８２１３",
        "٤٨٢١٣",
        "四号：48213号",
        "48213 123",
    ],
)
def test_a_number_is_found_in_any_spelling_of_its_digits(said):
    assert value(needle.number(said, ["48213"])) == 1


@pytest.mark.parametrize(
    "said", ["", "148213", "482130", "48 21 3", "48,2130", "4821", "48,213,000"]
)
def test_another_number_that_holds_the_digits_is_wrong(said):
    assert value(needle.number(said, ["48213"])) == 0


def test_every_number_has_to_be_found():
    assert value(needle.number("12 and 345", ["345", "12"])) == 1
    assert value(needle.number("12 and 34", ["345", "12"])) == 0


def test_the_first_number_is_the_answer():
    assert value(needle.first_number("It was 12, then 345.", ["12"])) == 1
    assert value(needle.first_number("It was 12, then 345.", ["345"])) == 0
    none = needle.first_number("no idea", ["12"])
    assert (none.value, none.failed) == (0, "no number in the prediction")
