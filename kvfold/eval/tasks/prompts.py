# SPDX-License-Identifier: Apache-2.0
"""Prompts of a benchmark's tasks, byte for byte, read from the TOML file beside its module."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import NamedTuple


class TaskPrompt(NamedTuple):
    """A task's prompt with `{context}` in it, the most tokens of an answer, and the skill tested.

    Other names in braces are replaced by a row's fields. `summary` is one line about the task,
    `answer_prefix` the answer's first words.
    """

    prompt: str
    max_new_tokens: int
    group: str
    summary: str = ""
    answer_prefix: str = ""

    @property
    def parts(self) -> tuple[str, str]:
        """Texts before and after the context."""
        before, after = self.prompt.split("{context}")
        return before, after


def prompts_of(benchmark: str) -> dict[str, TaskPrompt]:
    """The prompts of a benchmark's tasks, by their names."""
    text = files("kvfold.eval.tasks").joinpath(f"{benchmark}.toml").read_text(encoding="utf-8")
    return {task: TaskPrompt(**about) for task, about in tomllib.loads(text).items()}
