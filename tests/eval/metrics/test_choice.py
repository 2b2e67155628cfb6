# SPDX-License-Identifier: Apache-2.0
"""Letters of multiple choice."""

import pytest

from kvfold.eval.metrics import choice


@pytest.mark.parametrize(
    ("prediction", "letter"),
    [
        ("The correct answer is (B)", "B"),
        ("**The correct answer is** C.", "C"),
        ("The correct answer is (D), not (A)", "D"),
        ("B", None),
    ],
)
def test_the_letter_of_longbench_v2(prediction, letter):
    assert choice.letter(prediction) == letter
    scored = choice.accuracy(prediction, "B")
    assert scored.value == (letter == "B")
    assert bool(scored.failed) == (letter is None)
    merged = choice.accuracy(prediction, "B", compensated=True)
    assert merged.value == (0.25 if letter is None else letter == "B")
