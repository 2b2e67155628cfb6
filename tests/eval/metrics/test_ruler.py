# SPDX-License-Identifier: Apache-2.0
"""RULER's scores: the share of answers, any paraphrase, control characters."""

from kvfold.eval.metrics import ruler
from tests.helpers.metrics import value


def test_ruler_counts_the_share_of_answers():
    assert value(ruler.string_match_all("ABCDE, fghij", ["abcde", "FGHIJ", "KLMNO"])) == 2 / 3


def test_any_of_rulers_paraphrases_is_enough():
    answers = ["Denver Broncos", "Broncos", "the Broncos"]
    assert value(ruler.string_match_part("It was Denver Broncos.", answers)) == 1
    # As a share of all, which lm-evaluation-harness takes, it would be two thirds.
    assert value(ruler.string_match_all("It was Denver Broncos.", answers)) == 2 / 3


def test_control_characters_do_not_glue_lines_together():
    assert ruler.cleaned(" 12\x0034\t\n") == "12\n34"
    assert value(ruler.string_match_all("12\x0034", ["1234"])) == 0
