# SPDX-License-Identifier: Apache-2.0
"""Depth-first walks through a graph: long answers whose every line depends on the lines before.

The model writes each step and the stack of open nodes. An answer that loses track of what it has
written goes wrong at a line, and that line is known.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from kvfold.eval.metrics import MetricScore
from kvfold.eval.tasks.base import Question, SampleRequest, Task, TaskSample
from kvfold.eval.tasks.generated import fitted

LEAST_NODES = 4
DEGREE = 3  # neighbours of a node beside its parent, at most
ROOM = 2  # limit of an answer over the right one's length: a cache that loses track writes more
NODES = ["".join(parts) for parts in itertools.product("bcdfghklmnprstvz", "aeiou", "klmnrst")]
INTRO = """\
Walk through a graph depth first. Begin at the start node. From a node go to the first node of its \
list that was not entered before; if there is none, leave it and go back. Write one line for each \
step: `enter` or `leave`, the node, and then the stack of nodes that are entered and not left. \
Write nothing else.

Example, start node tik: tik: mon rel; mon: rel; rel: mon.
enter tik: tik
enter mon: tik mon
enter rel: tik mon rel
leave rel: tik mon
leave mon: tik
leave tik: empty
"""


def walk(graph: dict[str, list[str]], start: str) -> list[str]:
    """The lines of a right answer."""
    lines, stack, entered = [f"enter {start}: {start}"], [start], {start}
    while stack:
        onward = next((node for node in graph[stack[-1]] if node not in entered), None)
        if onward is None:
            left = stack.pop()
            lines.append(f"leave {left}: {' '.join(stack) or 'empty'}")
        else:
            stack.append(onward)
            entered.add(onward)
            lines.append(f"enter {onward}: {' '.join(stack)}")
    return lines


def _graph(size: int, rng: random.Random) -> dict[str, list[str]]:
    """A connected graph of `size` nodes, with a few edges that lead back."""
    nodes = rng.sample(NODES, size)
    graph: dict[str, list[str]] = {node: [] for node in nodes}
    for index, node in enumerate(nodes[1:], 1):
        open_ = [other for other in nodes[max(0, index - 8) : index] if len(graph[other]) < DEGREE]
        graph[rng.choice(open_ or nodes[index - 1 : index])].append(node)
    for node in rng.sample(nodes, size // 4):
        graph[node].append(rng.choice(nodes))
    return {node: rng.sample(onward, len(onward)) for node, onward in graph.items()}


def _generate(request: SampleRequest) -> Iterator[TaskSample]:
    """Samples whose prompt and longest answer fill the request's length."""
    count = request.counter()

    def build(size: int, rng: random.Random, index: int) -> TaskSample:
        graph = _graph(size, rng)
        start, listed = next(iter(graph)), list(graph.items())
        rng.shuffle(listed)
        lines = "\n".join(f"{node}: {' '.join(onward)}".rstrip() for node, onward in listed)
        answer = "\n".join(walk(graph, start))
        asked = Question(f"\n\nStart node: {start}", (answer,), ROOM * count(answer))
        context = f"{INTRO}\nThe graph:\n{lines}"
        return TaskSample("graph_walk", index, context, (asked,), metadata={"nodes": size})

    return fitted(request, "graph_walk", build, LEAST_NODES, len(NODES))


def _written(prediction: str) -> list[str]:
    """Lines of an answer that are steps."""
    lines = [" ".join(line.replace("`", "").split()) for line in prediction.splitlines()]
    return [line for line in lines if line.startswith(("enter ", "leave "))]


def steps_until_error(prediction: str, asked: Question) -> MetricScore:
    """Part of the steps that are right before the first wrong one."""
    right = asked.answers[0].splitlines()
    pairs = zip(_written(prediction), right, strict=False)
    good = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    return MetricScore(len(list(good)) / len(right))


def whole_walk(prediction: str, asked: Question) -> MetricScore:
    """1 if all steps are right, and no more are written."""
    return MetricScore(float(_written(prediction) == asked.answers[0].splitlines()))


TASKS = (
    Task(
        "graph_walk",
        "a depth-first walk, with the stack written at each step",
        "kvfold",
        "graph_walk",
        "long answers",
        _generate,
        {"steps until error": steps_until_error, "whole walk": whole_walk},
        phase="decode",
        generated=True,
    ),
)
