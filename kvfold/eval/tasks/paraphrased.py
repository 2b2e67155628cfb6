# SPDX-License-Identifier: Apache-2.0
"""Needles whose questions share no word with them, so that no copy of the question finds them.

RULER's questions repeat the needle's words, and a method that keeps what such words attend to
does well by that alone. Here the question paraphrases the needle. The haystack is RULER's noise
unless another is given; the answer is a number of five digits, which is easy to score.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from kvfold.eval.metrics.needle import number as metric
from kvfold.eval.tasks.base import Question, SampleRequest, Task, TaskSample, by_answers
from kvfold.eval.tasks.generated import fitted, number
from kvfold.eval.tasks.haystack import Haystack
from kvfold.eval.tasks.needle import depth

NAME = "needle_paraphrased"
DIGITS = 5
MAX_NEW_TOKENS = 30
LEAST_WORDS = 20
INTRO = (
    "A fact is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the fact afterwards."
)
ANSWER_PREFIX = "Answer:"


class Paraphrase(NamedTuple):
    """A needle with `{number}` in it, and the question about it in other words."""

    needle: str
    question: str


WORDINGS = {
    "code": Paraphrase(
        "The lock on the old barn opens with the code {number}.",
        "Which digits let a farmer into the ancient stable?",
    ),
    "population": Paraphrase(
        "Exactly {number} people live in the town of Karsund.",
        "How many inhabitants does the municipality have?",
    ),
    "price": Paraphrase(
        "The painter sold her last canvas for {number} dollars.",
        "How much money did the artist receive for the final picture?",
    ),
    "steps": Paraphrase(
        "The doctor walked {number} steps on Sunday.",
        "How many paces did the physician take at the weekend?",
    ),
    "phone": Paraphrase(
        "Whoever finds the lost puppy should call {number}.",
        "What is the phone number of the missing dog's owner?",
    ),
}


def generate(request: SampleRequest) -> Iterator[TaskSample]:
    """Samples that take the wordings in turn, and each wording at every depth.

    Raises KvfoldError if the haystack cannot be read, or `length` is too short.
    """
    haystack, names = Haystack.of(request), list(WORDINGS)
    cycle = math.lcm(len(names), request.depths)

    def build(size: int, rng: random.Random, index: int) -> TaskSample:
        name, value = names[index % len(names)], number(rng, DIGITS)
        # One step more after a cycle: else five depths would be one for each wording.
        percent = depth(index + index // cycle, request.depths)
        needle = WORDINGS[name].needle.format(number=value)
        question = Question(
            f"\n\nQuestion: {WORDINGS[name].question}", (value,), MAX_NEW_TOKENS, ANSWER_PREFIX
        )
        return TaskSample(
            NAME,
            index,
            f"{INTRO}\n\n{haystack.hiding({needle: percent}, size, rng)}",
            (question,),
            stop=("\n",),
            metadata={"wording": name, "depth": percent, "haystack": haystack.name},
        )

    return fitted(request, NAME, build, LEAST_WORDS)


TASKS = (
    Task(
        NAME,
        "a number, asked for in other words than the text's",
        "kvfold",
        "needles",
        "single needle",
        generate,
        {"number": by_answers(metric)},
        generated=True,
    ),
)
