# SPDX-License-Identifier: Apache-2.0
"""ROUGE-L recall: how much of a protected text an answer repeats."""

from __future__ import annotations

from collections.abc import Sequence

from kvfold.eval.metrics.words import marks, words

WORDS = "words of any script"  # in the protocol: other words give other numbers


def recall(protected: str, answer: str) -> float:
    """LCS of the words of both texts over the words of `protected`; 0 for a blank text.

    A protected text without words, such as one of symbols, is compared by its characters.
    """
    split = words if words(protected) else marks
    wanted, said = split(protected), split(answer)
    return common(wanted, said) / len(wanted) if wanted else 0.0


def common(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    lengths = [0] * (len(other) + 1)
    for word in one:
        before = lengths[:]
        for place, found in enumerate(other, 1):
            same = before[place - 1] + 1 if word == found else 0
            lengths[place] = max(same, before[place], lengths[place - 1])
    return lengths[-1]
