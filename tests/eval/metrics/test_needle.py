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
