# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' tasks, by name: a context, questions about it, and how answers are scored."""

from __future__ import annotations

from collections.abc import Iterable

from kvfold.errors import KvfoldError
from kvfold.eval.tasks import (
    infinitebench,
    key_value,
    longbench,
    longbench_v2,
    loogle,
    maths,
    mt_bench,
    needle,
    perplexity,
    ruler_niah,
    ruler_qa,
    ruler_tracking,
    ruler_words,
    scbench,
)
from kvfold.eval.tasks.record import Question, Record, Request, Task, Unreadable

__all__ = ["Question", "Record", "Request", "Task", "Unreadable", "select", "tasks"]

_FILES = (
    ruler_niah, ruler_tracking, ruler_words, ruler_qa, needle, key_value, perplexity, longbench,
    longbench_v2, loogle, infinitebench, scbench, maths, mt_bench,
)  # fmt: skip


def tasks() -> dict[str, Task]:
    """Every task by its name, the generated ones first."""
    return {task.name: task for file in _FILES for task in file.TASKS}


def select(names: Iterable[str]) -> list[Task]:
    """The tasks named, and all of a benchmark where its name stands for them, each once.

    Raises KvfoldError for a name that is neither.
    """
    known, found = tasks(), dict[str, Task]()
    for name in names:
        members = [known[name]] if name in known else []
        members = members or [task for task in known.values() if task.benchmark == name]
        if not members:
            benchmarks = dict.fromkeys(task.benchmark for task in known.values())
            raise KvfoldError(
                f"unknown task {name!r}: choose of {', '.join(benchmarks)}, or one task"
            )
        found |= {task.name: task for task in members}
    return list(found.values())
