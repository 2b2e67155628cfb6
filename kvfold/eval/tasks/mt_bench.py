# SPDX-License-Identifier: Apache-2.0
"""MT-bench: transcripts of two turns, where the second turn sees the first through the cache.

Source: lm-sys/FastChat @0e6d3e4b, `fastchat/llm_judge/common.py` (Zheng et al., 2023,
arXiv 2306.05685). A row holds `question_id`, `category` and `turns`. Nothing is scored: the
benchmark's judge is a model behind an API.
"""

from __future__ import annotations

from pydantic import Field

from kvfold.eval.tasks import source
from kvfold.eval.tasks.base import Question, Task, TaskSample

MAX_NEW_TOKENS = 1024
# The benchmark's sampling temperatures by category; 0 for others. Recorded, not applied.
TEMPERATURES = {"writing": 0.7, "roleplay": 0.7, "stem": 0.1, "humanities": 0.1}


class _MTBenchRow(source.DatasetRow):
    question_id: int
    category: str
    turns: list[str] = Field(min_length=1)


def _convert(row: _MTBenchRow) -> TaskSample:
    questions = tuple(Question(turn, (), MAX_NEW_TOKENS) for turn in row.turns)
    metadata = {
        "id": row.question_id,
        "category": row.category,
        "temperature": TEMPERATURES.get(row.category, 0.0),
    }
    return TaskSample("mt_bench", 0, "", questions, conversation=True, metadata=metadata)


TASKS = (
    Task(
        "mt_bench",
        "two turns of conversation, a transcript without a judge",
        "lm-sys/FastChat, arXiv 2306.05685",
        "mt_bench",
        "multi-turn",
        source.rows_of(_MTBenchRow, _convert, "question"),
        phase="decode",
    ),
)
