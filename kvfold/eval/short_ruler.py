# SPDX-License-Identifier: Apache-2.0
"""Simplified RULER retrieval tasks, used to train and demonstrate the bundled model.

Unlike in the benchmark (`kvfold.eval.tasks`), needles lie between single sentences of the noise, a
document can have several questions, and `length` counts the document only. Wording and metric are
the same. Source: NVIDIA/RULER (Hsieh et al., 2024, arXiv 2404.06654).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfold.eval.metrics.ruler import string_match_all
from kvfold.eval.tasks import ruler_wording as wording
from kvfold.eval.tasks.generated import number
from kvfold.eval.tasks.vocabulary import BUNDLED, Vocabulary

NOISE = wording.NOISE
TASKS = ("single", "multikey", "multivalue", "multiquery", "vt")
KEYS_PER_TASK = {"single": 1, "multikey": 4, "multivalue": 1, "multiquery": 4}
VALUES_PER_KEY = 4
HOPS = 4


@dataclass(frozen=True)
class NeedleQuestion:
    """A question, the first words of its answer, and the strings that a right answer contains."""

    text: str
    prefix: str
    answers: tuple[str, ...]

    def score(self, prediction: str) -> float:
        """Share of the answers found in `prediction`, in [0, 1] (RULER's `string_match_all`)."""
        return string_match_all(prediction, self.answers).value


@dataclass(frozen=True)
class NeedleDocument:
    """A document with needles, and questions about them."""

    task: str
    document: str
    questions: tuple[NeedleQuestion, ...]


def generate(
    task: str,
    length: int,
    count_tokens: Callable[[str], int],
    rng: random.Random,
    *,
    keys: int | None = None,
    questions: int = 1,
    haystack: Sequence[str] = NOISE,
    vocabulary: Vocabulary = BUNDLED,
) -> NeedleDocument:
    """One sample whose document has as many haystack sentences as fit into `length` tokens.

    `keys` overrides the task's number of needles. `questions` is the number of questions, drawn
    with replacement, so that none can be answered by elimination. Keys are made of words of
    `vocabulary`. Raises ValueError for an unknown task or a `length` that cannot hold the needles.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: choose one of {', '.join(TASKS)}")
    if task == "vt":
        intro, needles, asked = _variable_tracking(rng, questions)
    else:
        count = keys or KEYS_PER_TASK[task]
        intro, needles, asked = _needles(task, count, rng, questions, vocabulary)
    room = length - count_tokens(" ".join((intro, *needles)))
    if room < 0:
        raise ValueError(f"{length} tokens cannot hold the {len(needles)} needles of {task}")
    sentences = _fill(haystack, room, count_tokens, rng)
    places = sorted(rng.randint(0, len(sentences)) for _ in needles)
    for offset, (place, needle) in enumerate(zip(places, needles, strict=True)):
        sentences.insert(place + offset, needle)
    return NeedleDocument(task, f"{intro}\n{' '.join(sentences)}", asked)


def _fill(
    haystack: Sequence[str], room: int, count_tokens: Callable[[str], int], rng: random.Random
) -> list[str]:
    """Consecutive haystack sentences of at most `room` tokens, from a random start."""
    start = rng.randrange(len(haystack)) if haystack is not NOISE else 0
    costs: dict[str, int] = {}
    sentences: list[str] = []
    while True:
        sentence = haystack[(start + len(sentences)) % len(haystack)]
        if sentence not in costs:
            costs[sentence] = count_tokens(" " + sentence)
        room -= costs[sentence]
        if room < 0:
            return sentences
        sentences.append(sentence)


def _needles(
    task: str, n_keys: int, rng: random.Random, n_questions: int, words: Vocabulary
) -> tuple[str, list[str], tuple[NeedleQuestion, ...]]:
    """Introduction, needles in random order, and questions with answers of a needle task."""
    adjectives = rng.sample(words.adjectives, n_keys)
    names = [f"{a}-{n}" for a in adjectives for n in [rng.choice(words.nouns)]]
    n_values = VALUES_PER_KEY if task == "multivalue" else 1
    values = {name: [number(rng) for _ in range(n_values)] for name in names}
    # As in RULER: singular wording for one value, plural otherwise.
    several = task in ("multivalue", "multiquery")
    needles = [wording.needle("numbers", n, value) for n in names for value in values[n]]
    rng.shuffle(needles)
    asked = []
    for _ in range(n_questions):
        subset = (
            rng.sample(names, KEYS_PER_TASK[task]) if task == "multiquery" else [rng.choice(names)]
        )
        # Answers in the question's order of keys; a key's values in document order.
        answers = sorted(
            (value for name in subset for value in values[name]),
            key=lambda value: (
                next(i for i, name in enumerate(subset) if value in values[name]),
                next(i for i, needle in enumerate(needles) if value in needle),
            ),
        )
        text = wording.needles("numbers", subset, several)
        asked.append(NeedleQuestion(text.question, text.prefix.strip(), tuple(answers)))
    return wording.needles("numbers", names, several).intro, needles, tuple(asked)


def _variable_tracking(
    rng: random.Random, n_questions: int
) -> tuple[str, list[str], tuple[NeedleQuestion, ...]]:
    """Introduction, chain of assignments, and questions of variable tracking."""
    names = ["".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)) for _ in range(HOPS + 1)]
    value = str(rng.randint(10000, 99999))
    sources = [value, *(f"VAR {name}" for name in names)]
    needles = [f"VAR {name} = {source}." for name, source in zip(names, sources, strict=False)]
    text = wording.tracking(value, len(names))
    question = NeedleQuestion(text.question, text.prefix.strip(), tuple(names))
    return text.intro, needles, (question,) * n_questions
