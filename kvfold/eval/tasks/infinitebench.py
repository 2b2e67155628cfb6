# SPDX-License-Identifier: Apache-2.0
"""InfiniteBench's twelve tasks of 100 thousand tokens and more.

Source: OpenBMB/InfiniteBench @88b3daa, `src/eval_utils.py` (Zhang et al., 2024,
arXiv 2402.13718). A row holds `context`, `input`, `answer` and `options`. The prompts of math_find
and code_run state the question before the context; `metadata["question_first"]` then records that
even a question-agnostic compression has seen it.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from pydantic import Field

from kvfold.eval.metrics.infinitebench import METRICS
from kvfold.eval.tasks import source
from kvfold.eval.tasks.base import Question, Task, TaskSample, by_note

PROMPTS = source.prompts_of("infinitebench")
QUESTION_FIRST = frozenset({"math_find", "code_run"})
CHOICES = frozenset({"longbook_choice_eng", "code_debug"})
# JSON types of labels; texts of the other tasks.
LABELS = {
    "passkey": "text or integer",
    "number_string": "text or integer",
    "kv_retrieval": "text or integer",
    "code_run": "text or integer",
    "math_calc": "integer",
    "math_find": "number",
}


class _InfiniteBenchRow(source.DatasetRow):
    context: str = Field(min_length=1)
    input: str = ""
    answer: Any
    options: list[str] | None = None


def _fields(task: str, row: _InfiniteBenchRow) -> dict[str, str]:
    """Values for the fields in a prompt's braces; raises ValueError if the row lacks one."""
    fields = {"input": row.input}
    if task == "code_run":
        call = re.search(r"func_[0-9]+\(-?[0-9]+\)", row.input)
        if call is None:
            raise ValueError("field 'input': it calls no function")
        fields |= {"call": call.group(), "func": call.group().split("(")[0]}
    if task == "math_find":
        # Inputs such as "The second largest number of the list is:", "The median number of …".
        target = re.search(r"(The .+) of", row.input)
        if target is None:
            raise ValueError("field 'input': it asks for no number")
        fields["first"] = f"What is {target.group(1).lower()} in the following list?"
    if task in CHOICES:
        if not row.options or len(row.options) != 4:
            raise ValueError("field 'options': expected four")
        fields |= dict(zip("ABCD", row.options, strict=True))
    return fields


def label(task: str, row: _InfiniteBenchRow) -> Any:
    """The label in the metric's form: one value, a list, or an option's text and letter.

    Raises ValueError for an answer that is empty, of another type, or none of the options.
    """
    answer = row.answer
    if task == "math_calc" and isinstance(answer, list) and answer and isinstance(answer[0], list):
        answer = answer[0]
    values = source.labels(answer, LABELS.get(task, "text"))
    if task in CHOICES:
        options = row.options or []
        if len(values) == 2 and values[1] in tuple("ABCD"):
            return values
        if values[0] not in options:
            raise ValueError("field 'answer': it is none of the options")
        return [values[0], "ABCD"[options.index(values[0])]]
    if task == "math_calc" or task.startswith("long"):
        return values
    if task == "code_run":
        return int(values[0])
    return values[0] if task == "math_find" else str(values[0])


def _convert(task: str, row: _InfiniteBenchRow) -> TaskSample:
    prompt, (before, after) = PROMPTS[task], PROMPTS[task].parts
    fields, expected = _fields(task, row), label(task, row)
    answers = expected if isinstance(expected, list) else [expected]
    question = Question(
        after.format_map(fields),
        tuple(str(answer) for answer in answers),
        prompt.max_new_tokens,
        prompt.answer_prefix.format_map(fields),
        {"label": expected},
    )
    return TaskSample(
        f"infinitebench_{task}",
        0,
        before.format_map(fields) + row.context,
        (question,),
        metadata={"question_first": task in QUESTION_FIRST},
    )


TASKS = tuple(
    Task(
        f"infinitebench_{task}",
        prompt.summary,
        "OpenBMB/InfiniteBench, arXiv 2402.13718",
        "infinitebench",
        prompt.group,
        source.rows_of(
            _InfiniteBenchRow, partial(_convert, task), task, "xinrongzhang2022/InfiniteBench", task
        ),
        {METRICS[task][0]: by_note("label", METRICS[task][1])},
        truncation="middle",
    )
    for task, prompt in PROMPTS.items()
)
