# SPDX-License-Identifier: Apache-2.0
"""Structural tokens of a text, as kvpress's pull request 288 describes them."""

import pytest
import torch

import kvfold
from kvfold.generation.structure import structural


class Words:
    """A tokenizer of whole words; at the beginning of a text it shows no space, as Llama's."""

    def __init__(self, *words):
        self.words = words

    def decode(self, ids, **options):
        return "".join(self.words[i] for i in ids).removeprefix(" ")


def marked(words, text, repeats=4):
    """Words of `text` that are structural, by place."""
    ids = torch.tensor([words.index(word) for word in text])
    return structural(Words(*words), ids, repeats).tolist()


def test_golden_full_stops_and_line_breaks_that_come_five_times():
    text = ["1", ".", " apple", "\n"] * 5
    assert marked(["1", ".", " apple", "\n"], text) == [False, True, False, True] * 5


def test_hyphens_inside_words_are_none():
    text = ["8", "f", "-", "4", "a", " "] * 5
    assert (
        marked(["8", "f", "-", "4", "a", " "], text)
        == [False] * 5 + [True] + ([False] * 5 + [True]) * 4
    )


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("'s", True), ("-ce", True), (" (", True), ("\n", True), ("  ", True), ("été", False),
        ("e\u0301", False), ("42", False), (" word", False), ("日本", False), ("\ufffd", False),
    ],
)  # fmt: skip
def test_words_and_digits_are_never_structural(token, expected):
    text = [token, " and"] * 4
    assert marked([token, " and"], text) == [expected, False] * 4


def test_a_token_is_structural_from_its_fourth_occurrence_in_the_text_on():
    words = [";", " and"]
    assert not any(marked(words, words * 3))
    assert marked(words, words * 4) == [True, False] * 4
    assert marked(words, words * 3, repeats=3) == [True, False] * 3


def test_joiners_need_letters_on_both_sides_and_no_whitespace():
    words = ["a", "-", "b", " b", "-\n", "(", "a "]

    def second(*text):
        return marked(words, list(text) + ["-", "-\n", " b"] * 4)[1]

    assert not second("a", "-", "b")
    assert second("a", "-", " b") and second("a ", "-", "b")
    assert second("a", "-\n", "b") and second("(", "-", "b") and second("a", "-", "(")
    # Nothing stands before the first token, and nothing behind the last.
    assert marked(words, ["-", "b"] * 4)[0] and marked(words, ["b", "-"] * 4)[-1]


def test_tokens_of_a_real_vocabulary():
    _, tokenizer = kvfold.bundled_model()
    text = "id 8f-4a, was read. \n" * 5
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
    found = {tokenizer.decode([i]) for i in ids[structural(tokenizer, ids, 4)]}
    assert found and not any(any(c.isalnum() for c in piece) for piece in found)
    assert "-" not in found
