# SPDX-License-Identifier: Apache-2.0
"""The two ROUGEs, texts that overflow them, and Chinese."""

import pytest

from kvfold.eval.metrics import infinitebench, rouge
from tests.helpers.metrics import value


def test_the_two_rouges_differ():
    prediction, reference = "the cat sat. the cat ran. the cat", "the cat ran"
    # Three of four different words against three of all eight.
    assert value(rouge.pltrdy(prediction, reference)) == pytest.approx(6 / 7)
    assert value(rouge.google(prediction, [reference], "rougeL")) == pytest.approx(6 / 11)


def test_one_long_sentence_is_a_counted_failure():
    text = " ".join(f"word{number}" for number in range(1100))
    scored = rouge.pltrdy(text, "word1 word2")
    assert scored.value == 0
    assert "RecursionError" in scored.failed
    # The same words in sentences can be scored.
    assert value(rouge.pltrdy(text.replace(" ", ". "), "word1 word2")) > 0


def test_which_texts_overflow_does_not_depend_on_the_caller():
    text = " ".join(f"word{number}" for number in range(600))

    def deep(calls):
        return deep(calls - 1) if calls else rouge.pltrdy(text, "word1 word2")

    assert deep(600) == rouge.pltrdy(text, "word1 word2")


@pytest.mark.parametrize("empty", ["", "...", "  "])
def test_an_empty_text_is_a_counted_failure(empty):
    assert rouge.pltrdy(empty, "a reference").failed
    assert rouge.pltrdy("a prediction", empty).failed


@pytest.mark.slow
def test_chinese_rouge_counts_segments():
    assert value(rouge.pltrdy_zh("我爱北京", "我爱北京天安门")) == pytest.approx(0.857142, abs=1e-5)


def test_words_are_not_stemmed():
    assert value(infinitebench.summary("running", ["run"])) == 0
    # Sentences are lines, and the best reference counts.
    assert value(infinitebench.summary("a b\nc d", ["x", "c d\na b"])) == 1
