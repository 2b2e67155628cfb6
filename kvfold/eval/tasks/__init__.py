# SPDX-License-Identifier: Apache-2.0
"""Registry of evaluation tasks: each has contexts, questions about them, and metrics."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from kvfold.errors import KvfoldError
from kvfold.eval.tasks import (
    graph_walk,
    infinitebench,
    key_value,
    longbench,
    longbench_v2,
    loogle,
    maths,
    mt_bench,
    needle,
    own,
    perplexity,
    profile,
    ruler_niah,
    ruler_qa,
    ruler_tracking,
    ruler_words,
    scbench,
    tool_session,
)
from kvfold.eval.tasks.base import (
    NoData,
    Question,
    SampleRequest,
    Task,
    TaskSample,
    UnreadableSample,
)

__all__ = [
    "NoData",
    "Question",
    "SampleRequest",
    "Task",
    "TaskSample",
    "UnreadableSample",
    "families",
    "select",
    "tasks",
]

_FILES = (
    ruler_niah, ruler_tracking, ruler_words, ruler_qa, needle, key_value, profile, graph_walk,
    tool_session, perplexity, longbench, longbench_v2, loogle, infinitebench, scbench, maths,
    mt_bench, own,
)  # fmt: skip


def tasks() -> dict[str, Task]:
    """All tasks by name, generated ones first."""
    return {task.name: task for file in _FILES for task in file.TASKS}


def families() -> dict[str, list[Task]]:
    """Tasks by benchmark."""
    found: dict[str, list[Task]] = {}
    for task in tasks().values():
        found.setdefault(task.benchmark, []).append(task)
    return found


def select(names: Iterable[str]) -> list[Task]:
    """Tasks of the given task and benchmark names, each once.

    Raises KvfoldError for an unknown name.
    """
    known, found = tasks(), dict[str, Task]()
    for name in names:
        members = [known[name]] if name in known else families().get(name, [])
        if not members:
            raise KvfoldError(_unknown(name, known))
        found |= {task.name: task for task in members}
    return list(found.values())


def _unknown(name: str, known: Mapping[str, Task]) -> str:
    """Error message with suggestions: tasks that end in the name, or similar names."""
    near = [task for task in known if task.endswith(f"_{name}")]
    near = near or difflib.get_close_matches(name, [*known, *families()], 3, 0.75)
    meant = f"did you mean {' or '.join(map(repr, near))}? If not, " if near else ""
    return f"unknown task {name!r}: {meant}choose of {', '.join(families())}, or one task"
