# SPDX-License-Identifier: Apache-2.0
"""Common parts of RULER's tasks: registration, and the reader of ready-made files.

Source: NVIDIA/RULER @c3f5e3b (Hsieh et al., 2024, arXiv 2404.06654). Rows of a file hold `index`,
`input`, `outputs`, `length` (prompt and answer in tokens) and, since 2025, `answer_prefix`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvfold.eval.metrics.ruler import string_match_all, string_match_part
from kvfold.eval.tasks import base, source
from kvfold.eval.tasks.base import Question, SampleRequest, Samples, Task, TaskSample, by_answers

MAX_NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
# First words of a prompt's question, and of its answer's prefix.
_STARTS = {
    "niah": ("\nWhat ", " The special magic "),
    "vt": ("\nQuestion: ", " Answer: According to "),
    "cwe": ("\nQuestion: ", " Answer: The top "),
    "fwe": ("\nQuestion: ", " Answer: According to "),
    "qa": ("\n\nAnswer the question based ", " Answer:"),
}

Family = Literal["niah", "vt", "cwe", "fwe", "qa"]


class _RulerRow(source.DatasetRow):
    input: str = Field(min_length=1)
    outputs: list[str] = Field(min_length=1)
    length: int
    answer_prefix: str | None = None


def task(
    name: str, family: Family, group: str, summary: str, generate: base.Draw, generated: bool = True
) -> Task:
    """One of the 13 tasks; samples come from `name`.jsonl if given, else from `generate`."""

    def samples(request: SampleRequest) -> Samples:
        if not generated or not source.has(request, name):
            return generate(request)
        return read(name, family, request)

    metric = string_match_part if family == "qa" else string_match_all

    return Task(
        f"ruler_{name}",
        summary,
        "NVIDIA/RULER, arXiv 2404.06654",
        "ruler",
        group,
        samples,
        {metric.__name__: by_answers(metric)},
        generated=generated,
        rows=name if generated else "",
    )


def read(name: str, family: Family, request: SampleRequest) -> Samples:
    """Records of a ready-made file, each prompt split into context, question and answer prefix.

    Raises KvfoldError if there is no such file.
    """
    question_start, prefix_start = _STARTS[family]

    def convert(row: _RulerRow) -> TaskSample:
        prompt = row.input + (row.answer_prefix or "")
        answer = prompt.rfind(prefix_start)
        ask = prompt.rfind(question_start, 0, max(answer, 0))
        if ask < 0:
            raise ValueError(f"the prompt does not end in the question and prefix of {name}")
        question = Question(
            prompt[ask:answer], tuple(row.outputs), MAX_NEW_TOKENS[family], prompt[answer:]
        )
        return TaskSample(
            f"ruler_{name}", 0, prompt[:ask], (question,), metadata={"tokens": row.length}
        )

    return source.samples(request, _RulerRow, convert, file=name)
