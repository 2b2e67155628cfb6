# SPDX-License-Identifier: Apache-2.0
"""LooGLE: many questions about one long document, a shared context of real text.

Source: bigai-nlco/LooGLE @6734382, `config/task2prompt.json`, `config/task2maxlen.json` (Li et
al., 2023, arXiv 2311.04939). A row holds `input`, `title`, `qa_pairs` and `output`; `qa_pairs` is
a Python literal, which is parsed, never evaluated.
"""

from __future__ import annotations

import ast
from functools import partial
from typing import Any

from pydantic import Field

from kvfold.eval.metrics import loogle as metrics
from kvfold.eval.tasks import source
from kvfold.eval.tasks.base import Metric, Question, Task, TaskSample, by_answer, by_note

PROMPTS = source.prompts_of("loogle")


class _LooGLERow(source.DatasetRow):
    input: str = Field(min_length=1)
    title: str | None = None
    qa_pairs: str
    output: str | list[str] | None = None


def _pairs(row: _LooGLERow) -> list[tuple[str, Any]]:
    if row.qa_pairs == "none":
        return [("", row.output)]
    return [(pair["Q"], pair["A"]) for pair in ast.literal_eval(row.qa_pairs)]


def _convert(task: str, row: _LooGLERow) -> TaskSample:
    before, after = PROMPTS[task].parts
    try:
        pairs = _pairs(row)
    except (SyntaxError, ValueError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise ValueError(
            f"field 'qa_pairs': no list of questions and answers: {error!r:.200}"
        ) from error
    if not pairs:
        raise ValueError("field 'qa_pairs': there is no question")
    questions = []
    for asked, answer in pairs:
        if not isinstance(asked, str):
            raise ValueError(f"field 'qa_pairs': a question is {asked!r:.40}, not a text")
        expected: type = dict if task == "shortdep_cloze" else str
        if not isinstance(answer, expected) or not answer:
            raise ValueError(f"an answer is {answer!r}, not a {expected.__name__}")
        parts = (*answer, *answer.values()) if isinstance(answer, dict) else ()
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f"field 'qa_pairs': masks and names are {answer!r:.40}, not texts")
        text, limit = after.replace("{Q}", asked), PROMPTS[task].max_new_tokens
        questions.append(Question(text, (str(answer),), limit, metadata={"answer": answer}))
    name, metadata = f"loogle_{task}", {"title": row.title}
    return TaskSample(name, 0, before + row.input, tuple(questions), metadata=metadata)


_TEXT: dict[str, Metric] = {
    "rouge_l_recall": by_answer(partial(metrics.rouge_recall, kind="rouge-l")),
    "rouge_1_recall": by_answer(partial(metrics.rouge_recall, kind="rouge-1")),
    "rouge_2_recall": by_answer(partial(metrics.rouge_recall, kind="rouge-2")),
    "bleu_1": by_answer(partial(metrics.bleu, order=1)),
    "bleu_4": by_answer(partial(metrics.bleu, order=4)),
}
_MASKS: dict[str, Metric] = {
    "exact_match": by_note("answer", metrics.cloze),
    "partial_match": by_note("answer", partial(metrics.cloze, partial=True)),
}

TASKS = tuple(
    Task(
        f"loogle_{task}",
        prompt.summary,
        "bigai-nlco/LooGLE, arXiv 2311.04939",
        "loogle",
        prompt.group,
        source.rows_of(_LooGLERow, partial(_convert, task), task, "bigainlco/LooGLE", task),
        _MASKS if task == "shortdep_cloze" else _TEXT,
        truncation="middle",
    )
    for task, prompt in PROMPTS.items()
)
