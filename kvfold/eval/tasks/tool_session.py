# SPDX-License-Identifier: Apache-2.0
"""A session of an agent with its tools: listings, searches and edits, and what was seen when."""

from __future__ import annotations

import random
from collections.abc import Iterator

from kvfold.eval.metrics import MetricScore
from kvfold.eval.metrics.ruler import string_match_part
from kvfold.eval.tasks.base import Question, SampleRequest, Task, TaskSample
from kvfold.eval.tasks.generated import fitted, number

TURNS = 40
MAX_NEW_TOKENS = 16
LEAST_LINES = 1
FOLDERS = ("api", "billing", "cache", "docs", "export", "fonts", "games", "hooks", "images", "jobs")
WORDS = (
    "anchor", "basket", "candle", "dragon", "engine", "falcon", "garden", "hammer", "island",
    "jacket", "kettle", "ladder", "mirror", "needle", "orchid", "pencil", "quartz", "ribbon",
    "saddle", "tunnel", "urchin", "violin", "walnut", "yellow", "zipper",
)  # fmt: skip
INTRO = """\
You watch an agent that works on a project with tools. After the output of each tool you are asked \
about something that was seen in this session. Answer with the name or the number only."""


def _file(rng: random.Random) -> str:
    return f"{rng.choice(FOLDERS)}/{rng.choice(WORDS)}_{rng.choice(WORDS)}.py"


class _Session:
    """What was seen so far, by the number of its turn: a question's text, and its answer."""

    def __init__(self, rng: random.Random, lines: int) -> None:
        self.rng, self.lines = rng, lines
        self.facts: list[tuple[str, str]] = []

    def turn(self, index: int) -> Question:
        """One tool's output, and a question about this turn or one before."""
        tool = self.rng.choice((self._listing, self._search, self._edit))
        output, question, answer = tool(index)
        self.facts.append((question, answer))
        asked, right = self.rng.choice(self.facts)
        text = f"\n\nStep {index}. {output}\n\nQuestion: {asked}"
        return Question(text, (right,), MAX_NEW_TOKENS, "Answer:", {"step": index})

    def _listing(self, index: int) -> tuple[str, str, str]:
        folder = self.rng.choice(FOLDERS)
        sizes = {_file(self.rng).split("/")[1]: number(self.rng, 5) for _ in range(self.lines + 1)}
        name = self.rng.choice(list(sizes))
        listed = "\n".join(f"{size} {file}" for file, size in sizes.items())
        return (
            f"$ ls -s {folder}\n{listed}",
            f"In step {index}, what size did {name} have?",
            sizes[name],
        )

    def _search(self, index: int) -> tuple[str, str, str]:
        word, right = self.rng.choice(WORDS), _file(self.rng)
        found = [f"{right}:{number(self.rng, 3)}: def {word}_{number(self.rng, 4)}()"]
        found += [f"{_file(self.rng)}: no match" for _ in range(self.lines)]
        self.rng.shuffle(found)
        return (
            f"$ search {word}\n" + "\n".join(found),
            f"Which file had the match of the search in step {index}?",
            right,
        )

    def _edit(self, index: int) -> tuple[str, str, str]:
        file, before, after = _file(self.rng), number(self.rng, 5), number(self.rng, 5)
        kept = [f"  {self.rng.choice(WORDS)} = {number(self.rng, 4)}" for _ in range(self.lines)]
        changed = [f"- limit = {before}", f"+ limit = {after}"]
        return (
            f"$ edit {file}\n" + "\n".join([*kept, *changed]),
            f"To what number was the limit changed in step {index}?",
            after,
        )


def _generate(request: SampleRequest) -> Iterator[TaskSample]:
    """Sessions of `TURNS` turns whose outputs are as long as the request's length allows."""

    def build(size: int, rng: random.Random, index: int) -> TaskSample:
        session = _Session(rng, size)
        turns = tuple(session.turn(turn) for turn in range(1, TURNS + 1))
        return TaskSample("tool_session", index, INTRO, turns, stop=("\n",), conversation=True)

    return fitted(request, "tool_session", build, LEAST_LINES)


def _score(prediction: str, asked: Question) -> MetricScore:
    return string_match_part(prediction, asked.answers)


TASKS = (
    Task(
        "tool_session",
        "forty turns of an agent's tools, asked about what was seen when",
        "kvfold",
        "tool_session",
        "multi-turn",
        _generate,
        {"substring": _score},
        generated=True,
    ),
)
