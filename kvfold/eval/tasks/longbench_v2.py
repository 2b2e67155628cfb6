# SPDX-License-Identifier: Apache-2.0
"""LongBench v2: multiple choice of four, contexts of 8 thousand to 2 million words.

Source: THUDM/LongBench @2e00731, `prompts/0shot.txt`, `pred.py`, `result.py` (Bai et al., 2024,
arXiv 2412.15204). A row holds `context`, `question`, `choice_A` to `choice_D`, `answer`,
`difficulty`, `length`, `domain`. The benchmark samples at temperature 0.1; here decoding is
greedy.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field

from kvfold.eval.metrics.choice import accuracy
from kvfold.eval.tasks import source
from kvfold.eval.tasks.base import Question, Task, TaskSample, by_answer

MAX_NEW_TOKENS = 128


class _LongBenchV2Row(source.DatasetRow):
    context: str = Field(min_length=1)
    question: str
    choice_A: str
    choice_B: str
    choice_C: str
    choice_D: str
    answer: Literal["A", "B", "C", "D"]
    difficulty: str | None = None
    length: str | None = None
    domain: str | None = None


def _convert(row: _LongBenchV2Row) -> TaskSample:
    text = (
        f"\n</text>\n\nWhat is the correct answer to this question: {row.question.strip()}\n"
        f"Choices:\n(A) {row.choice_A.strip()}\n(B) {row.choice_B.strip()}\n"
        f"(C) {row.choice_C.strip()}\n(D) {row.choice_D.strip()}\n\n"
        'Format your response as follows: "The correct answer is (insert answer here)".'
    )
    before = "Please read the following text and answer the question below.\n\n<text>\n"
    return TaskSample(
        "longbench_v2",
        0,
        before + row.context.strip(),
        (Question(text, (row.answer,), MAX_NEW_TOKENS),),
        metadata={"difficulty": row.difficulty, "length": row.length, "domain": row.domain},
    )


TASKS = (
    Task(
        "longbench_v2",
        "multiple choice over long documents, code, tables and dialogues",
        "THUDM/LongBench, arXiv 2412.15204",
        "longbench_v2",
        "multiple choice",
        source.rows_of(_LongBenchV2Row, _convert, "longbench_v2", "THUDM/LongBench-v2"),
        {
            "accuracy": by_answer(accuracy),
            "compensated_accuracy": by_answer(partial(accuracy, compensated=True)),
        },
        truncation="middle",
    ),
)
