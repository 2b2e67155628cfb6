# SPDX-License-Identifier: Apache-2.0
"""Needle in a haystack at every depth, scored by keywords; ROUGE for comparison.

Source: gkamradt/LLMTest_NeedleInAHaystack @7b90d28 (the needle and its place, after the last
sentence that ends before the depth); Zefan-Cai/KVCache-Factory `run_needle_in_haystack.py` (the
prompt, 30 tokens, one line; its "<|im_start|>" is plain text for every model). Without `haystack`
the text is RULER's noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from kvfold.eval.metrics import needle as metric
from kvfold.eval.tasks import ruler_wording
from kvfold.eval.tasks.base import Question, SampleRequest, Task, TaskSample, by_answers, by_note
from kvfold.eval.tasks.generated import fitted, number
from kvfold.eval.tasks.haystack import Haystack
from kvfold.eval.tasks.vocabulary import Vocabulary

MAX_NEW_TOKENS = 30
OPENING = "<|im_start|> This is a very long story book: <book> "
LEAST_WORDS = 20


@dataclass(frozen=True)
class Needle:
    """A sentence to hide, the question about it, and the keywords of a right answer."""

    text: str
    question: str
    keywords: tuple[str, ...]


SANDWICH = Needle(
    "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park "
    "on a sunny day.",
    "What is the best thing to do in San Francisco?",
    ("sandwich", "Dolores Park"),
)

# Draws the needle of a sample.
Draw = Callable[[random.Random, SampleRequest], Needle]


def magic(rng: random.Random, request: SampleRequest) -> Needle:
    """A needle with random key and number in RULER's wording, so that no model can know it."""
    key, value = Vocabulary.of(request.words).keys(rng, 1)[0], number(rng)
    text = ruler_wording.needles("numbers", [key], several=False)
    return Needle(ruler_wording.needle("numbers", key, value), text.question, (value,))


def depth(index: int, depths: int) -> float:
    """Depth of sample `index` in percent; samples cycle through `depths` even steps, 0 to 100."""
    return 100 * (index % depths) / max(depths - 1, 1)


def generate(name: str, draw: Draw, request: SampleRequest) -> Iterator[TaskSample]:
    """Records that cycle through the depths; use a multiple of `depths` samples.

    The haystack starts at a random sentence, so that samples of one depth differ. Raises
    KvfoldError if the haystack cannot be read, or `length` is too short.
    """
    haystack = Haystack.of(request)

    def build(size: int, rng: random.Random, index: int) -> TaskSample:
        needle, percent = draw(rng, request), depth(index, request.depths)
        context = f"{OPENING}{haystack.hiding({needle.text: percent}, size, rng)} </book>."
        question = Question(
            f"\n Based on the content of the book, Question: {needle.question}",
            needle.keywords,
            MAX_NEW_TOKENS,
            "\nAnswer:",
            {"needle": needle.text},
        )
        metadata = {"depth": percent, "length": request.length, "haystack": haystack.name}
        return TaskSample(name, index, context, (question,), stop=("\n",), metadata=metadata)

    return fitted(request, name, build, LEAST_WORDS)


def task(name: str, summary: str, draw: Draw) -> Task:
    """The task of hiding the needles that `draw` returns, one per sample."""
    return Task(
        name,
        summary,
        "gkamradt/LLMTest_NeedleInAHaystack",
        "niah",
        "single needle",
        partial(generate, name, draw),
        {
            "keywords": by_answers(metric.keywords),
            "rouge_1": by_note("needle", metric.rouge_1),
            "rouge_l": by_note("needle", metric.rouge_l),
        },
        generated=True,
    )


TASKS = (
    task("niah_sandwich", "the sandwich in Dolores Park, at every depth", lambda *drawn: SANDWICH),
    task("niah_magic", "a new number for a new key, at every depth", magic),
)
