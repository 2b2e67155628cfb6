# SPDX-License-Identifier: Apache-2.0
"""Needles that depend on one another, far apart: a value replaced later, a value by way of another.

The score is the first number of the answer: a prediction that lists all numbers is wrong. The
haystack is RULER's noise unless another is given.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from kvfold.eval.metrics.needle import first_number
from kvfold.eval.tasks.base import Question, SampleRequest, Task, TaskSample, by_answers
from kvfold.eval.tasks.generated import fitted, number
from kvfold.eval.tasks.haystack import Haystack
from kvfold.eval.tasks.needle import depth

DIGITS = 5
MAX_NEW_TOKENS = 16
LEAST_WORDS = 20
NAMES = [
    "Alice", "Tom", "Mary", "Peter", "James", "Emma", "David", "Laura", "Paul", "Sarah", "Mark",
    "Helen",
]  # fmt: skip
INTRO = (
    "Facts about codes are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about the facts afterwards."
)


class RelatedNeedles(NamedTuple):
    """Sentences with their depths in percent, and the question that needs two of them.

    `value_depth` is that of the sentence with the value, `other_depth` of the one it depends on.
    """

    needles: dict[str, float]
    question: str
    prefix: str
    value: str
    value_depth: float
    other_depth: float


# Draws the needles of a sample, at some of the given depths.
Draw = Callable[[random.Random, list[float]], RelatedNeedles]


def replaced(rng: random.Random, depths: list[float]) -> RelatedNeedles:
    """One key with two values, of which the later replaces the earlier."""
    name = rng.choice(NAMES)
    before, now = sorted(rng.sample(depths, 2))
    old, new = numbers(rng, 2)
    return RelatedNeedles(
        {
            f"The code of {name} is {old}.": before,
            f"The earlier code of {name} was replaced: the code of {name} is now {new}.": now,
        },
        f"What is the code of {name} now?",
        f"The code of {name} is now",
        new,
        value_depth=now,
        other_depth=before,
    )


def two_hops(rng: random.Random, depths: list[float]) -> RelatedNeedles:
    """One key whose value is another's, stated before or after it; a third has its own."""
    asked, known, third = rng.sample(NAMES, 3)
    link, at, aside = rng.sample(depths, 3)
    value, wrong = numbers(rng, 2)
    return RelatedNeedles(
        {
            f"{asked} has the same code as {known}.": link,
            f"The code of {known} is {value}.": at,
            f"The code of {third} is {wrong}.": aside,
        },
        f"Which number is the code of {asked}?",
        f"The code of {asked} is the number",
        value,
        value_depth=at,
        other_depth=link,
    )


def numbers(rng: random.Random, count: int) -> list[str]:
    """So many different numbers."""
    found = dict[str, None]()
    while len(found) < count:
        found[number(rng, DIGITS)] = None
    return list(found)


def _generate(name: str, draw: Draw, request: SampleRequest) -> Iterator[TaskSample]:
    """Samples at random ones of `request.depths` depths, three at least.

    Raises KvfoldError if the haystack cannot be read, or `length` is too short.
    """
    haystack, steps = Haystack.of(request), max(request.depths, 3)
    depths = [depth(step, steps) for step in range(steps)]

    def build(size: int, rng: random.Random, index: int) -> TaskSample:
        drawn = draw(rng, depths)
        question = Question(
            f"\n\nQuestion: {drawn.question}", (drawn.value,), MAX_NEW_TOKENS, drawn.prefix
        )
        return TaskSample(
            name,
            index,
            f"{INTRO}\n\n{haystack.hiding(drawn.needles, size, rng)}",
            (question,),
            stop=("\n",),
            metadata={
                "depth": drawn.value_depth,
                "distance": abs(drawn.value_depth - drawn.other_depth),
                "haystack": haystack.name,
            },
        )

    return fitted(request, name, build, LEAST_WORDS)


def _task(name: str, summary: str, draw: Draw) -> Task:
    return Task(
        name,
        summary,
        "kvfold",
        "needles",
        "many needles",
        partial(_generate, name, draw),
        {"first_number": by_answers(first_number)},
        generated=True,
    )


TASKS = (
    _task("needle_replaced", "the later of two values of one key", replaced),
    _task("needle_two_hops", "a key whose value is another key's", two_hops),
)
