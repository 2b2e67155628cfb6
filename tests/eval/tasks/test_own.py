# SPDX-License-Identifier: Apache-2.0
"""Own questions: asked and scored as their rows say."""

import pytest

from kvfold.eval.metrics import named
from kvfold.eval.tasks import TaskSample, UnreadableSample
from tests.helpers.tasks import ALL, read


def test_own_questions_are_asked_and_scored_as_their_rows_say(tmp_path):
    rows = [
        {"context": "The code is 7.", "question": "Which code?", "answer": "7"},
        {"context": "x", "question": "y?", "answers": ["a cat", "a dog"], "metric": "f1",
         "answer_prefix": " It is", "max_new_tokens": 5, "id": 12},
        {"context": "x", "question": "y?", "answers": ["12"], "metric": "number"},
    ]  # fmt: skip
    plain, chosen, number = read("jsonl", rows, tmp_path)
    task = ALL["jsonl"]
    assert plain.prompt(plain.questions[0]) == "The code is 7.\n\nWhich code?"
    assert task.score("I think 7", plain.questions[0]).value == 1
    assert task.score("a cat", chosen.questions[0]).value == 1
    assert task.score("the dog barks", chosen.questions[0]).value == pytest.approx(2 / 3)
    assert (chosen.questions[0].answer_prefix, chosen.questions[0].max_new_tokens) == (" It is", 5)
    assert task.score("11, no, 12.", number.questions[0]).value == 1
    assert [one.metadata["metric"] for one in (plain, chosen, number)] == [
        "contains", "f1", "number",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"question": "y?", "answer": "a"}, "field 'context'"),
        ({"context": "x", "question": "y?"}, "either 'answer'"),
        ({"context": "x", "question": "y?", "answer": "a", "answers": ["b"]}, "either 'answer'"),
        ({"context": "x", "question": "y?", "answer": 7}, "field 'answer'"),
        ({"context": "x", "question": "y?", "answers": []}, "field 'answers'"),
        ({"context": "x", "question": "y?", "answers": [""]}, "field 'answers': one is empty"),
        ({"context": "x", "question": "y?", "answer": "a", "metric": "bleu"}, "'bleu' is none of"),
        ({"context": "x", "question": "y?", "answer": "a", "max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_bad_rows_of_own_questions_are_refused_with_line_and_reason(row, why, tmp_path):
    good = {"context": "x", "question": "y?", "answer": "a"}
    first, bad, last = read("jsonl", [good, row, good], tmp_path)
    assert isinstance(first, TaskSample) and isinstance(last, TaskSample)
    assert isinstance(bad, UnreadableSample) and bad.where.endswith(":2") and why in bad.why


@pytest.mark.slow
def test_every_named_metric_says_what_it_is_and_knows_the_right_answer():
    assert list(named.NAMED) == list(named.MEANS)
    for name, metric in named.NAMED.items():
        right = "\\boxed{12}" if name == "math" else "12"
        assert metric(right, ["13", "12"]).value == (0.5 if name == "contains_all" else 1), name
        assert metric("\\boxed{5}" if name == "math" else "5", ["12"]).value < 1, name
