# SPDX-License-Identifier: Apache-2.0
"""Needles with questions in other words."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product

import pytest

from kvfold.errors import KvfoldError
from kvfold.eval.tasks.paraphrased import ANSWER_PREFIX, INTRO, WORDINGS
from tests.helpers.tasks import ALL, made

FUNCTION_WORDS = {
    "a", "an", "and", "at", "did", "does", "for", "have", "her", "how", "i", "in", "into", "is",
    "it", "many", "much", "of", "on", "s", "should", "the", "to", "what", "which", "whoever",
    "will", "with", "within", "you",
}  # fmt: skip


def content(text: str) -> set[str]:
    return set(re.findall("[a-z]+", text.lower())) - FUNCTION_WORDS


def of_one_stem(one: str, other: str) -> bool:
    """True for words with the same first five letters, or of which one begins with the other."""
    least = min(5, len(one), len(other))
    return one[:least] == other[:least]


def test_of_one_stem_are_lock_and_locker_but_not_puppy_and_dog() -> None:
    assert of_one_stem("lock", "locker") and of_one_stem("inhabit", "inhabitants")
    assert not of_one_stem("puppy", "dog") and not of_one_stem("painter", "picture")


@pytest.mark.parametrize("name", WORDINGS)
def test_a_question_shares_no_content_word_with_its_needle(name: str) -> None:
    needle, question = WORDINGS[name]
    asked = content(f"{INTRO} {question} {ANSWER_PREFIX}")
    hidden = content(needle.replace("{number}", ""))
    assert len(hidden) >= 3 and len(content(question)) >= 2
    assert not [pair for pair in product(hidden, asked) if of_one_stem(*pair)]


def test_the_sample_holds_its_needle_once_and_names_its_wording() -> None:
    for index, sample in enumerate(made("needle_paraphrased", 10)):
        name = list(WORDINGS)[index % 5]
        (value,) = sample.questions[0].answers
        assert sample.metadata["wording"] == name
        assert sample.context.count(WORDINGS[name].needle.format(number=value)) == 1
        assert re.findall(r"\d+", sample.context) == [value] and len(value) == 5
        asked = sample.prompt(sample.questions[0])
        assert asked.endswith(f"\n\nQuestion: {WORDINGS[name].question}Answer:")


def test_the_needle_stands_at_its_depth_in_a_book(tmp_path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It rained on the hills. Nobody came. " * 200, encoding="utf-8")
    for sample in made("needle_paraphrased", 11, haystack=book):
        body = sample.context.removeprefix(f"{INTRO}\n\n")
        place = 100 * body.index(sample.questions[0].answers[0]) / len(body)
        assert abs(place - sample.metadata["depth"]) < 5
        assert sample.metadata["haystack"] == "book.txt"


@pytest.mark.parametrize("task", ["needle_paraphrased", "needle_de", "ruler_niah_single_2"])
def test_a_text_without_sentences_has_no_depths(tmp_path, task) -> None:
    """All needles would stand at its beginning."""
    (tmp_path / "words.txt").write_text("word " * 4000)
    with pytest.raises(
        KvfoldError, match=r"words\.txt has 16,000 characters to a sentence: needles"
    ):
        made(task, haystack=tmp_path / "words.txt")


@pytest.mark.parametrize("task", ["ruler_niah_single_1", "ruler_niah_multikey_2"])
def test_a_text_without_sentences_does_not_end_tasks_that_do_not_use_it(tmp_path, task) -> None:
    (tmp_path / "words.txt").write_text("word " * 4000)
    assert made(task, haystack=tmp_path / "words.txt")


@pytest.mark.parametrize("depths", [5, 10, 11])
def test_every_wording_is_at_every_depth(depths: int) -> None:
    samples = made("needle_paraphrased", 5 * depths, depths=depths, length=300)
    pairs = Counter((one.metadata["wording"], one.metadata["depth"]) for one in samples)
    assert len(pairs) == 5 * depths and set(pairs.values()) == {1}


def test_a_number_is_right_with_separators_and_not_within_a_longer_one() -> None:
    task, sample = ALL["needle_paraphrased"], made("needle_paraphrased", 1)[0]
    (value,) = sample.questions[0].answers
    for right in (value, f" {value[:2]},{value[2:]} people.", f"The code is {value}"):
        assert task.score(right, sample.questions[0]).value == 1
    assert task.score(f"1{value}", sample.questions[0]).value == 0
