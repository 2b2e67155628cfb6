# SPDX-License-Identifier: Apache-2.0
"""Passages of a fit: pieces of the texts as they are, half of them with records."""

from __future__ import annotations

import random

import pytest

from kvfold import KvfoldError
from kvfold.fit.passages import drawn
from tests.fit.test_fit import WORDS


def test_half_of_the_passages_carry_records():
    prose = " ".join(WORDS * 60) + "."
    made = drawn([prose, prose], 20, 300, seed=3)
    assert made == drawn([prose, prose], 20, 300, seed=3)
    with_digits = [any(letter.isdigit() for letter in passage) for passage in made]
    assert sum(with_digits) == 10
    kinds = "\n".join(drawn([prose], 100, 300, seed=1))
    assert all(sign in kinds for sign in ('{\n  "', "def check_", "name,date", " ms\n", "\n- "))


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
