# SPDX-License-Identifier: Apache-2.0
"""Sessions of an agent's tools: every question's answer stands in the step that it names."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import kvfold
from kvfold.eval.run.cell import EvalCell, EvalProtocol, EvaluatedModel
from kvfold.eval.run.job import EvalJob, run_job
from kvfold.eval.tasks import SampleRequest, TaskSample, tasks
from kvfold.eval.tasks.tool_session import TURNS

TASK = tasks()["tool_session"]


def made(count: int, length: int = 4000, seed: int = 0) -> list[TaskSample]:
    request = SampleRequest(
        samples=count, length=length, seed=seed, count=lambda text: len(text.split())
    )
    return list(TASK.samples(request))


def test_answers_stand_in_the_step_that_is_asked_about():
    behind = 0
    for sample in made(3):
        steps = {
            int(re.findall(r"Step (\d+)\.", each.text)[0]): each.text.rpartition("\n\n")[0]
            for each in sample.questions
        }
        assert list(steps) == list(range(1, TURNS + 1)) and sample.conversation
        for number, each in enumerate(sample.questions, 1):
            (about,) = map(int, re.findall(r"in step (\d+)\?", each.text))
            assert about <= number
            # The sentence that begins the answer stands once in the whole session.
            sentence = f"{each.answer_prefix} {each.answers[0]}"
            assert steps[about].splitlines().count(sentence) == 1
            assert sum(step.count(each.answer_prefix) for step in steps.values()) == 1
            behind += about < number - 5
    assert behind > TURNS  # most questions are about what is long gone


def test_a_session_is_as_long_as_the_request_allows():
    lengths = [made(1, length)[0].metadata["tokens"] for length in (2000, 4000, 8000)]
    for tokens, length in zip(lengths, (2000, 4000, 8000), strict=True):
        assert 0.9 * length < tokens <= length
    assert made(2) == made(2) and made(2) != made(2, seed=1)


def test_an_answer_is_right_if_it_holds_the_name():
    asked = made(1)[0].questions[0]
    assert TASK.score(f"It was {asked.answers[0].upper()}.", asked).value == 1
    assert TASK.score("I do not know", asked).value == 0


@pytest.mark.slow
def test_tools_outputs_are_compressed_whatever_the_protocol():
    """They are turns: a context compressed before the questions would hold none of them."""
    model, tokenizer = kvfold.bundled_model()
    sample = replace(made(1, 1700)[0])
    sample = replace(sample, questions=sample.questions[:4])
    cell = EvalCell(
        subject=EvaluatedModel.of("bundled", model, tokenizer), task="tool_session", length=1700,
        seed=0, data=(), protocol=EvalProtocol(max_length=4096, answer_tokens=2),
        method="streaming_llm", budget="60",
    )  # fmt: skip
    ((line,),) = run_job(model, tokenizer, EvalJob({0: sample}, (cell,)))
    held = line.outcome.held
    assert held.seen > 200 and held.kept * held.seen < 70
