# SPDX-License-Identifier: Apache-2.0
"""Key-value retrieval: one UUID among many, barely compressible, the hard case for eviction.

Source: nelson-liu/lost-in-the-middle @29b8a6d, `src/lost_in_the_middle/prompting.py` and
`scripts/evaluate_kv_responses.py` (Liu et al., 2023, arXiv 2307.03172, section 3). Its rows hold
`ordered_kv_records`, `key` and `value`. `shared_kv` and `conversation_kv` ask many keys of one
context, as SCBench does (arXiv 2412.10319).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial

from pydantic import Field

from kvfold.eval.metrics.ruler import string_match_part
from kvfold.eval.tasks import base, source
from kvfold.eval.tasks.base import Question, SampleRequest, Samples, Task, TaskSample, by_answers
from kvfold.eval.tasks.generated import fitted, identifier

# A UUID takes at most 36 tokens, one per character.
MAX_NEW_TOKENS = 50
LEAST_PAIRS = 2
INTRO = "Extract the value corresponding to the specified key in the JSON object below."

Pairs = Sequence[tuple[str, str]]


class _KeyValueRow(source.DatasetRow):
    ordered_kv_records: list[list[str]] = Field(min_length=LEAST_PAIRS)
    key: str
    value: str


def context(pairs: Pairs) -> str:
    """The prompt up to the question: the pairs as JSON lines in the benchmark's format."""
    lines = ",\n ".join(f'"{key}": "{value}"' for key, value in pairs)
    return f"{INTRO}\n\nJSON data:\n{{{lines}}}"


def question(key: str, value: str) -> Question:
    """The question for a key, whose answer is its value."""
    return Question(f'\n\nKey: "{key}"', (value,), MAX_NEW_TOKENS, "\nCorresponding value:")


def _build(
    name: str, questions: int, conversation: bool, size: int, rng: random.Random, index: int
) -> TaskSample:
    """A sample with `size` random pairs and `questions` random keys to look up."""
    pairs = [(identifier(rng), identifier(rng)) for _ in range(size)]
    asked = [rng.randrange(size) for _ in range(questions)]
    return TaskSample(
        name,
        index,
        context(pairs),
        tuple(question(*pairs[place]) for place in asked),
        conversation=conversation,
        metadata={"pairs": size, "places": asked},
    )


def _single(request: SampleRequest) -> Samples:
    """Records of kv_retrieval: from the benchmark's rows if given, else generated."""
    if not source.has(request, "kv_retrieval"):
        return fitted(
            request, "kv_retrieval", partial(_build, "kv_retrieval", 1, False), LEAST_PAIRS
        )

    def convert(row: _KeyValueRow) -> TaskSample:
        pairs = [(key, value) for key, value in row.ordered_kv_records]
        if (row.key, row.value) not in pairs:
            raise ValueError(f"key {row.key!r} and its value are not among the pairs")
        metadata = {"pairs": len(pairs), "places": [pairs.index((row.key, row.value))]}
        asked = (question(row.key, row.value),)
        return TaskSample("kv_retrieval", 0, context(pairs), asked, metadata=metadata)

    return source.samples(request, _KeyValueRow, convert, file="kv_retrieval")


def _many(name: str, conversation: bool, request: SampleRequest) -> Iterator[TaskSample]:
    build = partial(_build, name, request.questions, conversation)
    return fitted(request, name, build, LEAST_PAIRS)


def _task(name: str, summary: str, group: str, samples: base.Draw, also: str = "") -> Task:
    source = f"nelson-liu/lost-in-the-middle, arXiv 2307.03172{also}"
    metrics = {"substring": by_answers(string_match_part)}
    rows = name if name == "kv_retrieval" else ""
    return Task(
        name, summary, source, "kv_retrieval", group, samples, metrics, generated=True, rows=rows
    )


TASKS = (
    _task("kv_retrieval", "one UUID's value in a JSON object", "many needles", _single),
    _task(
        "shared_kv", "many questions, each on its own, about one JSON object", "shared context",
        partial(_many, "shared_kv", False), "; SCBench's shared context",
    ),
    _task(
        "conversation_kv", "one question after the other about one JSON object", "multi-turn",
        partial(_many, "conversation_kv", True), "; SCBench's turns",
    ),
)  # fmt: skip
