# SPDX-License-Identifier: Apache-2.0
"""RULER's retrieval tasks, generated on the fly with fresh keys and values.

Source: NVIDIA/RULER, `scripts/data/synthetic/{niah,variable_tracking}.py` for the wording and
`scripts/eval/synthetic/constants.py` for the metric (Hsieh et al., 2024, arXiv 2404.06654).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfold.eval.words import ADJECTIVES, NOUNS

NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
TASKS = ("single", "multikey", "multivalue", "multiquery", "vt")
KEYS_PER_TASK = {"single": 1, "multikey": 4, "multivalue": 1, "multiquery": 4}
VALUES_PER_KEY = 4
HOPS = 4


@dataclass(frozen=True)
class Question:
    """One question, the words its answer starts with, and the strings a right answer contains."""

    text: str
    prefix: str
    answers: tuple[str, ...]

    def score(self, prediction: str) -> float:
        """Share of the answers found in `prediction`, in [0, 1] (RULER's `string_match_all`)."""
        found = re.sub(r"[\x00-\x1f]", "\n", prediction).lower()
        return sum(answer.lower() in found for answer in self.answers) / len(self.answers)


@dataclass(frozen=True)
class Sample:
    """A document with needles in it, and questions about them."""

    task: str
    document: str
    questions: tuple[Question, ...]


def generate(
    task: str,
    length: int,
    count_tokens: Callable[[str], int],
    rng: random.Random,
    *,
    keys: int | None = None,
    questions: int = 1,
    haystack: Sequence[str] = NOISE,
) -> Sample:
    """One sample whose document holds as many haystack sentences as fit into `length` tokens.

    `keys` overrides the task's number of needles; `questions` are drawn with replacement, so that
    none can be answered by elimination. Raises ValueError for an unknown task or a `length` that
    cannot hold the needles.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: choose one of {', '.join(TASKS)}")
    if task == "vt":
        intro, needles, asked = _variable_tracking(rng, questions)
    else:
        intro, needles, asked = _needles(task, keys or KEYS_PER_TASK[task], rng, questions)
    room = length - count_tokens(" ".join((intro, *needles)))
    if room < 0:
        raise ValueError(f"{length} tokens cannot hold the {len(needles)} needles of {task}")
    sentences = _fill(haystack, room, count_tokens, rng)
    places = sorted(rng.randint(0, len(sentences)) for _ in needles)
    for offset, (place, needle) in enumerate(zip(places, needles, strict=True)):
        sentences.insert(place + offset, needle)
    return Sample(task, f"{intro}\n{' '.join(sentences)}", asked)


def _fill(
    haystack: Sequence[str], room: int, count_tokens: Callable[[str], int], rng: random.Random
) -> list[str]:
    """Consecutive haystack sentences, from a random start, that take at most `room` tokens."""
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
    task: str, n_keys: int, rng: random.Random, n_questions: int
) -> tuple[str, list[str], tuple[Question, ...]]:
    names = [f"{a}-{n}" for a in rng.sample(ADJECTIVES, n_keys) for n in [rng.choice(NOUNS)]]
    n_values = VALUES_PER_KEY if task == "multivalue" else 1
    values = {name: [_number(rng, 7) for _ in range(n_values)] for name in names}
    # RULER: the wording is singular when one value is asked for, plural otherwise.
    several = task in ("multivalue", "multiquery")
    what, be = ("numbers", "are") if several else ("number", "is")
    intro = (
        f"{'Some' if several else 'A'} special magic {what} {be} hidden within the following text. "
        f"Make sure to memorize it. I will quiz you about the {what} afterwards."
    )
    needles = [
        f"One of the special magic numbers for {name} is: {value}."
        for name in names
        for value in values[name]
    ]
    rng.shuffle(needles)
    asked = []
    for _ in range(n_questions):
        subset = (
            rng.sample(names, KEYS_PER_TASK[task]) if task == "multiquery" else [rng.choice(names)]
        )
        keys = subset[0] if len(subset) == 1 else ", ".join(subset[:-1]) + f", and {subset[-1]}"
        # Document order within a key, the question's order over keys.
        answers = sorted(
            (value for name in subset for value in values[name]),
            key=lambda value: (
                next(i for i, name in enumerate(subset) if value in values[name]),
                next(i for i, needle in enumerate(needles) if value in needle),
            ),
        )
        ask = "What are all" if several else "What is"
        asked.append(
            Question(
                f"{ask} the special magic {what} for {keys} mentioned in the provided text?",
                f"The special magic {what} for {keys} mentioned in the provided text {be}",
                tuple(answers),
            )
        )
    return intro, needles, tuple(asked)


def _variable_tracking(
    rng: random.Random, n_questions: int
) -> tuple[str, list[str], tuple[Question, ...]]:
    names = ["".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)) for _ in range(HOPS + 1)]
    value = str(rng.randint(10000, 99999))
    sources = [value, *(f"VAR {name}" for name in names)]
    needles = [f"VAR {name} = {source}." for name, source in zip(names, sources, strict=False)]
    question = Question(
        f"Question: Find all variables that are assigned the value {value} in the text above.",
        "Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {value}, they are:",
        tuple(names),
    )
    intro = "Memorize and track the chain(s) of variable assignment hidden in the following text."
    return intro, needles, (question,) * n_questions


def _number(rng: random.Random, digits: int) -> str:
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))
