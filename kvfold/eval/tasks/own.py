# SPDX-License-Identifier: Apache-2.0
"""User data: a JSONL file of contexts, questions and answers.

A row holds `context`, `question` and `answer` or `answers`; optionally `metric` (one of
`kvfold.eval.metrics.named`), `answer_prefix` and `max_new_tokens`. Other fields are ignored.
"""

from __future__ import annotations

from pydantic import Field

from kvfold.eval.metrics import MetricScore
from kvfold.eval.metrics.named import DEFAULT, NAMED
from kvfold.eval.tasks import source
from kvfold.eval.tasks.base import Question, Task, TaskSample

MAX_NEW_TOKENS = 64


class _OwnRow(source.DatasetRow):
    context: str = Field(min_length=1)
    question: str = Field(min_length=1)
    answer: str | None = Field(default=None, min_length=1)
    answers: list[str] | None = Field(default=None, min_length=1)
    metric: str = DEFAULT
    answer_prefix: str = ""
    max_new_tokens: int = Field(default=MAX_NEW_TOKENS, ge=1)


def _convert(row: _OwnRow) -> TaskSample:
    if (row.answer is None) == (row.answers is None):
        raise ValueError("give either 'answer', a text, or 'answers', a list of texts")
    if row.metric not in NAMED:
        raise ValueError(f"field 'metric': {row.metric!r} is none of {', '.join(NAMED)}")
    answers = row.answers or [row.answer or ""]
    if not all(answer.strip() for answer in answers):
        raise ValueError("field 'answers': one is empty")
    question = Question(
        f"\n\n{row.question}",
        tuple(answers),
        row.max_new_tokens,
        row.answer_prefix,
        {"metric": row.metric, "max_new_tokens": row.max_new_tokens},
    )
    return TaskSample("jsonl", 0, row.context, (question,), metadata={"metric": row.metric})


def _score(prediction: str, question: Question) -> MetricScore:
    return NAMED[question.metadata["metric"]](prediction, question.answers)


TASKS = (
    Task(
        "jsonl",
        "your own questions: context, question, answer or answers, metric",
        "a file of yours",
        "jsonl",
        "own data",
        source.rows_of(_OwnRow, _convert, "jsonl"),
        {"score": _score},
    ),
)
