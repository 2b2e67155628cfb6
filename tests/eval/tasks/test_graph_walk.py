# SPDX-License-Identifier: Apache-2.0
"""Walks through a graph, checked by a walk of another kind."""

from __future__ import annotations

import pytest

from kvfold.eval.tasks import SampleRequest, TaskSample, tasks
from kvfold.eval.tasks.base import Question
from kvfold.eval.tasks.graph_walk import walk

TASK = tasks()["graph_walk"]


def made(count: int, length: int = 1000, seed: int = 0) -> list[TaskSample]:
    request = SampleRequest(
        samples=count, length=length, seed=seed, count=lambda text: len(text.split())
    )
    return list(TASK.samples(request))


def by_recursion(graph: dict[str, list[str]], start: str) -> list[str]:
    lines: list[str] = []

    def visit(node: str, above: list[str]) -> None:
        seen.add(node)
        lines.append(f"enter {node}: {' '.join([*above, node])}")
        for onward in graph[node]:
            if onward not in seen:
                visit(onward, [*above, node])
        lines.append(f"leave {node}: {' '.join(above) or 'empty'}")

    seen: set[str] = set()
    visit(start, [])
    return lines


def graph_of(sample: TaskSample) -> dict[str, list[str]]:
    listed = sample.context.split("The graph:\n")[1].splitlines()
    return {node: onward.split() for node, _, onward in (line.partition(":") for line in listed)}


def test_the_example_of_the_prompt_is_right():
    example = made(1)[0].context.split("start node tik: ")[1]
    listed, *lines = example.split("\n\nThe graph")[0].strip().splitlines()
    graph = {
        node.strip(): onward.split()
        for node, _, onward in (part.partition(":") for part in listed.rstrip(".").split(";"))
    }
    assert lines == by_recursion(graph, "tik")


def test_the_answer_is_the_walk_through_the_graph_that_is_shown():
    for sample in made(4):
        (asked,) = sample.questions
        start = asked.text.split()[-1]
        assert asked.answers[0].splitlines() == by_recursion(graph_of(sample), start)
        assert len(graph_of(sample)) == sample.metadata["nodes"] > 10
        assert asked.answers[0].count("enter ") == sample.metadata["nodes"]


def test_prompt_and_answer_take_what_the_request_allows():
    for length in (300, 1000, 3000):
        for sample in made(3, length):
            assert sample.metadata["tokens"] <= length
            (asked,) = sample.questions
            assert asked.max_new_tokens > 0.4 * sample.metadata["tokens"]
            # Twice as much as a right answer, so that longer ones show.
            assert asked.max_new_tokens == 2 * len(asked.answers[0].split())
    assert made(2) == made(2) and made(2) != made(2, seed=1)


@pytest.mark.parametrize(
    ("prediction", "until_error", "whole"),
    [
        ("enter a: a\nenter b: a b\nleave b: a\nleave a: empty", 1.0, 1.0),
        ("Here it is:\n`enter a: a`\n enter b:  a b\nleave b: a\nleave a: empty\n", 1.0, 1.0),
        ("enter a: a\nenter b: a b\nleave a: b\nleave a: empty", 0.5, 0.0),
        ("enter a: a\nenter b: a b\nleave b: a", 0.75, 0.0),
        ("enter a: a\nenter b: a b\nleave b: a\nleave a: empty\nleave a: empty", 1.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_score_ends_at_the_first_wrong_step(prediction, until_error, whole):
    asked = Question("", ("\n".join(walk({"a": ["b"], "b": []}, "a")),), 100)
    found = {name: metric(prediction, asked).value for name, metric in TASK.metrics.items()}
    assert found == {"steps until error": until_error, "whole walk": whole}
