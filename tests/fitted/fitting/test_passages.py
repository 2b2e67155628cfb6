# SPDX-License-Identifier: Apache-2.0
"""Passages of a fit: pieces of the texts as they are, half of them with records."""

from __future__ import annotations

import random
from importlib import import_module

import pytest

from kvfold import KvfoldError
from kvfold.fitted.fitting.passages import drawn, too_short, without_passage
from tests.fitted.fitting.test_scorer import WORDS


def test_half_of_the_passages_carry_records():
    prose = " ".join(WORDS * 60) + "."
    made = drawn([prose, prose], 20, 300, seed=3)
    assert made == drawn([prose, prose], 20, 300, seed=3)
    with_digits = [any(letter.isdigit() for letter in passage) for passage in made]
    assert sum(with_digits) == 10
    kinds = "\n".join(drawn([prose], 100, 300, seed=1))
    assert all(sign in kinds for sign in ('{\n  "', "def check_", "name,date", " ms\n", "\n- "))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_each_text_gives_passages_with_records_and_without(count):
    """The k-th text's words are of its own letter, which records, of many letters, are not."""
    texts = [" ".join(["abcd"[place]] * 400) for place in range(count)]
    made = drawn(texts, 8 * count, 100, seed=0)
    for letter in "abcd"[:count]:
        own = [passage for passage in made if passage.split()[0] == letter]
        assert sum(set(passage) == {letter, " "} for passage in own) == 4


def test_as_many_texts_as_passages_give_half_of_them_records():
    made = drawn([" ".join(["a"] * 100)] * 8, 8, 100, seed=0)
    assert sum(set(passage) != {"a", " "} for passage in made) == 4


def test_texts_that_give_no_passage_are_known():
    texts = ["a few words", "a\nb\nc\nd\ne", "a " * 9]
    assert too_short(texts, 5) == [0]
    assert without_passage(texts, 1, 5) == [2] and not without_passage(texts, 2, 5)
    assert all("few" not in passage for passage in drawn(texts, 12, 5, seed=0))


def test_texts_without_enough_words_are_refused():
    with pytest.raises(KvfoldError, match="none has 300 words"):
        drawn(["a few words"], 8, 300, seed=0)
    with pytest.raises(KvfoldError, match="none has 300 words"):
        drawn(["a few words" + " " * 900 + "and blanks"], 8, 300, seed=0)


@pytest.mark.parametrize("between", [" ", "\n", "\n\n    ", "\t" + " " * 300, "\r\n"])
def test_passages_are_pieces_of_the_text_with_as_many_words(between):
    words = [f"word{number}" for number in range(500)]
    text = between + between.join(words) + between
    plain = [piece for piece in drawn([text], 20, 100, seed=2) if piece in text]
    assert len(plain) == 10
    assert all(len(piece.split()) == 100 and piece == piece.strip() for piece in plain)


def test_single_spaces_give_the_passages_that_a_split_at_spaces_gives():
    text, draw = " ".join(f"word{number}" for number in range(400)), random.Random(5)
    at = draw.randrange(400 - 50 + 1)
    assert drawn([text], 1, 50, seed=5) == [" ".join(text.split(" ")[at : at + 50])]


def test_the_old_address_warns_of_the_new_one():
    with pytest.warns(DeprecationWarning, match=r"is kvfold.fitted.fitting.passages now"):
        old = import_module("kvfold.fit.passages")
    assert old.drawn is drawn
