# SPDX-License-Identifier: Apache-2.0
"""ROUGE-L recall: how much of a protected text an answer repeats."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module

Words = Callable[[str], list[str]]


def recall(protected: str, answer: str) -> float:
    """LCS of the words of both texts over the words of `protected`; 0 for a text without words."""
    words, _ = tokenizer()
    wanted, said = words(protected), words(answer)
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


@cache
def tokenizer() -> tuple[Words, str]:
    """The splitter into words, and its description.

    Lower case, letters and digits; with Porter's stems where the package rouge-score is installed.
    """
    try:
        module = import_module("rouge_score.tokenizers")
    except ImportError:
        return plain_words, "lower-case words"
    return module.DefaultTokenizer(use_stemmer=True).tokenize, "stems by rouge-score"


def plain_words(text: str) -> list[str]:
    """Lower-case words of letters and digits of any script."""
    return re.findall(r"[^\W_]+", text.lower())
