# SPDX-License-Identifier: Apache-2.0
"""SCBench: one context, several queries, each on its own or as turns of one conversation.

Source: microsoft/MInference @fb56c91, `scbench/eval_utils.py` (Li et al., 2024, arXiv 2412.10319).
A row holds `context` and `multi_turns`, each with `input`, `answer` and optionally `options`. By
default each query sees the context alone; with `conversation` it also sees the turns before it.
Left out: RepoQA, which needs a parser of five languages, and the two mixed tasks.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from pydantic import AliasChoices, BaseModel, Field

from kvfold.eval.metrics.scbench import METRICS
from kvfold.eval.tasks import source
from kvfold.eval.tasks.base import Question, SampleRequest, Samples, Task, TaskSample, by_note

PROMPTS = source.prompts_of("scbench")
# JSON types of labels; texts of the other tasks.
LABELS = {
    "qa_eng": "text, number or truth value",
    "many_shot": "text, number or truth value",
    "mf": "number",
}


class _Turn(BaseModel):
    input: str
    answer: Any
    options: list[str] | None = None


class _SCBenchRow(source.DatasetRow):
    context: str = Field(min_length=1, validation_alias=AliasChoices("context", "input"))
    multi_turns: list[_Turn] = Field(min_length=1)


def _fields(task: str, row: _SCBenchRow, turn: _Turn) -> dict[str, str]:
    """Values for the fields in a prompt's braces; raises ValueError if a query lacks one."""
    fields = {"input": turn.input, "first": row.multi_turns[0].input}
    if task == "mf":
        target = re.search(r"The .+ is", turn.input)
        if target is None:
            raise ValueError("field 'multi_turns': a query asks for no number")
        fields["ask"] = f"What is {target.group().lower()[:-3]}?"
    if task == "choice_eng":
        if not turn.options or len(turn.options) != 4:
            raise ValueError("field 'multi_turns': expected four options")
        fields |= dict(zip("ABCD", turn.options, strict=True))
    return fields


def _label(task: str, turn: _Turn) -> Any:
    """The label in the metric's form: a list of values, or an option's text and letter.

    Raises ValueError for an answer that is empty or of another type.
    """
    values = source.labels(turn.answer, LABELS.get(task, "text"), "multi_turns.answer")
    if task == "choice_eng" and len(values) == 1 and turn.options and values[0] in turn.options:
        return [values[0], "ABCD"[turn.options.index(values[0])]]
    return values


def _convert(task: str, conversation: bool, row: _SCBenchRow) -> TaskSample:
    prompt, (before, after) = PROMPTS[task], PROMPTS[task].parts
    questions = []
    for turn in row.multi_turns:
        label, text = _label(task, turn), after.format_map(_fields(task, row, turn))
        answers = tuple(str(value) for value in label)
        asked = Question(
            text, answers, prompt.max_new_tokens, prompt.answer_prefix, {"label": label}
        )
        questions.append(asked)
    fields = _fields(task, row, row.multi_turns[0])
    return TaskSample(
        f"scbench_{task}",
        0,
        before.format_map(fields) + row.context,
        tuple(questions),
        conversation=conversation,
        metadata={"question_first": task == "mf"},
    )


def _samples(task: str, request: SampleRequest) -> Samples:
    convert = partial(_convert, task, request.conversation)
    name, hub = f"scbench_{task}", "microsoft/SCBench"
    return source.samples(request, _SCBenchRow, convert, file=name, hub=hub, subset=name)


TASKS = tuple(
    Task(
        f"scbench_{task}",
        prompt.summary,
        "microsoft/MInference, arXiv 2412.10319",
        "scbench",
        prompt.group,
        partial(_samples, task),
        {METRICS[task][0]: by_note("label", METRICS[task][1])},
        truncation="middle",
    )
    for task, prompt in PROMPTS.items()
)
