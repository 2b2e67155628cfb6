# SPDX-License-Identifier: Apache-2.0
"""LooGLE's scores: ROUGE's recall, BLEU and clozes."""

import pytest

from kvfold.eval.metrics import MetricScore, loogle
from tests.helpers.metrics import value


@pytest.mark.slow
def test_loogle_takes_rouges_recall_and_single_order_bleu():
    prediction, answer = "the cat sat on the mat", "the cat sat"
    assert value(loogle.rouge_recall(prediction, answer)) == pytest.approx(1)
    assert value(loogle.rouge_recall(answer, prediction, "rouge-1")) == pytest.approx(3 / 5)
    assert value(loogle.rouge_recall("", "None")) == pytest.approx(1)
    assert value(loogle.bleu(prediction, answer)) == pytest.approx(0.5)
    assert value(loogle.bleu("a b c d e", "a b c d x", 4)) == pytest.approx(0.5)


def test_clozes_are_read_as_literals_and_never_evaluated():
    answers = {"<mask-0>": "Bob Smith", "<mask-1>": "Rome"}
    half = "{'<mask-0>': 'Bob', '<mask-1>': 'Rome'}"
    assert loogle.cloze(half, answers) == MetricScore(0.5, None, 2)
    assert loogle.cloze(half, answers, partial=True) == MetricScore(1.0, None, 2)
    for broken in ("", "Bob", "['Bob']", "{'<mask-0>': open('x')}", "__import__('os').getcwd()"):
        assert loogle.cloze(broken, answers).failed
        assert loogle.cloze(broken, answers).weight == 2
