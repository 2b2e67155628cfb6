# SPDX-License-Identifier: Apache-2.0
"""RULER's aggregation tasks: most common words of a list, most frequent words of a coded text.

Source: NVIDIA/RULER @c3f5e3b, `scripts/data/synthetic/common_words_extraction.py` and
`freq_words_extraction.py` (Hsieh et al., 2024, arXiv 2404.06654, section 3.3). One difference: when
wonderwords run out, RULER continues with a list of all English words, kvfold with pairs of words.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator

from kvfold.eval.tasks import ruler
from kvfold.eval.tasks import ruler_wording as wording
from kvfold.eval.tasks.base import Question, SampleRequest, TaskSample
from kvfold.eval.tasks.generated import fitted
from kvfold.eval.tasks.vocabulary import Vocabulary

COMMON = 10
# Below this length in tokens, lists are shorter and words repeat less, as in RULER.
LONG = 4096
CODED_LETTERS = 6
# From this size on, the third word is more frequent than the fourth, so the answer is unique.
LEAST_CODED = 80


def _listed(words: list[str], repeats: int, others: int, rng: random.Random) -> str:
    """A shuffled numbered list: common words `repeats` times each, the others `others` times."""
    drawn = words[:COMMON] * repeats + words[COMMON:] * others
    rng.shuffle(drawn)
    return " ".join(f"{place}. {word}" for place, word in enumerate(drawn, 1))


def _common(request: SampleRequest) -> Iterator[TaskSample]:
    """Records of cwe: common words in a numbered list, after a solved example."""
    vocabulary, long = Vocabulary.of(request.words), request.length >= LONG
    example_words, example_repeats = (40, (10, 3)) if long else (20, (3, 1))
    repeats = (30, 3) if long else (6, 1)
    intro, question, prefix = wording.COMMON

    def build(size: int, rng: random.Random, index: int) -> TaskSample:
        solved = vocabulary.words(rng, example_words)
        answer = " ".join(f"{n}. {word}" for n, word in enumerate(solved[:COMMON], 1))
        example = f"{intro}\n{_listed(solved, *example_repeats, rng)}\n{question}{prefix} {answer}"
        words = vocabulary.words(rng, size)
        context = f"{example}\n{intro}\n{_listed(words, *repeats, rng)}"
        limit = ruler.MAX_NEW_TOKENS["cwe"]
        asked = Question(f"\n{question}", tuple(words[:COMMON]), limit, prefix)
        return TaskSample("ruler_cwe", index, context, (asked,), metadata={"words": size})

    return fitted(request, "cwe", build, COMMON + 1)


def _frequent(request: SampleRequest) -> Iterator[TaskSample]:
    """Records of fwe: coded words with Zeta-distributed frequencies."""
    intro, question, prefix = wording.FREQUENT
    limit = ruler.MAX_NEW_TOKENS["fwe"]
    size_of_vocabulary = max((request.length - limit) // 50, 5)

    def build(size: int, rng: random.Random, index: int) -> TaskSample:
        coded: dict[str, None] = {}
        while len(coded) < size_of_vocabulary:
            coded["".join(rng.choices(string.ascii_lowercase, k=CODED_LETTERS))] = None
        # As in RULER, the most frequent word is replaced by dots.
        ranked = ["...", *list(coded)[1:]]
        # Zeta distribution with exponent 2; ζ(2) = π² / 6.
        scale = size * 6 / math.pi**2
        drawn = [word for rank, word in enumerate(ranked, 1) for _ in range(int(scale / rank**2))]
        rng.shuffle(drawn)
        context = f"{intro} {' '.join(drawn)}"
        asked = Question(f"\n{question}", tuple(ranked[1:4]), limit, prefix)
        return TaskSample("ruler_fwe", index, context, (asked,), metadata={"words": len(drawn)})

    return fitted(request, "fwe", build, LEAST_CODED)


TASKS = (
    ruler.task("cwe", "cwe", "aggregation", "the ten most common words of a list", _common),
    ruler.task("fwe", "fwe", "aggregation", "the three most frequent coded words", _frequent),
)
