# SPDX-License-Identifier: Apache-2.0
"""A session of an agent with its tools: listings, searches and edits, and what was seen when."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from kvfold.eval.metrics.ruler import string_match_part
from kvfold.eval.tasks.base import Question, SampleRequest, Task, TaskSample, by_answers
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
# A command, the other lines of its output, and what is asked about.
Output = tuple[str, list[str], "_Fact"]
INTRO = """\
You watch an agent that works on a project with tools. After the output of each tool you are asked \
about something that was seen in this session. Answer with the name or the number only."""


def _file(rng: random.Random) -> str:
    return f"{rng.choice(FOLDERS)}/{rng.choice(WORDS)}_{rng.choice(WORDS)}.py"


class _Fact(NamedTuple):
    """Something that was seen in a step: a question, the sentence that answers it, the answer."""

    question: str
    sentence: str
    answer: str


class _Session:
    """Facts seen so far; each output has `lines` lines beside its fact."""

    def __init__(self, rng: random.Random, lines: int) -> None:
        self.rng, self.lines = rng, lines
        self.facts: list[_Fact] = []
        self.names = iter(rng.sample([f"{a}_{b}" for a in WORDS for b in WORDS], TURNS))

    def turn(self, index: int) -> Question:
        """One tool's output, and a question about this turn or one before."""
        tool = self.rng.choice((self._listing, self._search, self._edit))
        command, others, fact = tool(index, next(self.names))
        self.facts.append(fact)
        output = [*others, f"{fact.sentence} {fact.answer}"]
        self.rng.shuffle(output)
        asked = self.rng.choice(self.facts)
        text = "\n".join([f"\n\nStep {index}. $ {command}", *output, f"\n{asked.question}"])
        return Question(text, (asked.answer,), MAX_NEW_TOKENS, asked.sentence, {"step": index})

    def _listing(self, index: int, name: str) -> Output:
        folder = self.rng.choice(FOLDERS)
        others = [f"{_file(self.rng)} has {number(self.rng, 5)}" for _ in range(self.lines)]
        sentence = f"{folder}/{name}.py has"
        question = f"How many bytes did {folder}/{name}.py have in step {index}?"
        return f"list {folder}", others, _Fact(question, sentence, number(self.rng, 5))

    def _search(self, index: int, name: str) -> Output:
        others = [f"{_file(self.rng)} has no match" for _ in range(self.lines)]
        question = f"Which file defined {name} in step {index}?"
        return f"search {name}", others, _Fact(question, f"{name} is defined in", _file(self.rng))

    def _edit(self, index: int, name: str) -> Output:
        others = [
            f"kept {self.rng.choice(WORDS)} at {number(self.rng, 4)}" for _ in range(self.lines)
        ]
        question = f"To what number was {name} changed in step {index}?"
        fact = _Fact(question, f"{name} is now", number(self.rng, 5))
        return f"edit {_file(self.rng)}", others, fact


def _generate(request: SampleRequest) -> Iterator[TaskSample]:
    """Sessions of `TURNS` turns whose outputs are as long as the request's length allows."""

    def build(size: int, rng: random.Random, index: int) -> TaskSample:
        session = _Session(rng, size)
        turns = tuple(session.turn(turn) for turn in range(1, TURNS + 1))
        return TaskSample("tool_session", index, INTRO, turns, stop=("\n",), conversation=True)

    return fitted(request, "tool_session", build, LEAST_LINES)


TASKS = (
    Task(
        "tool_session",
        "forty turns of an agent's tools, asked about what was seen when",
        "kvfold",
        "tool_session",
        "multi-turn",
        _generate,
        {"substring": by_answers(string_match_part)},
        phase="decode",  # tools' outputs are turns: a context alone would hold none of them
        generated=True,
    ),
)
