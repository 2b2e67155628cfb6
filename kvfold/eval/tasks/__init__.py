# SPDX-License-Identifier: Apache-2.0
"""Registry of evaluation tasks: each has contexts, questions about them, and metrics."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata

from kvfold.errors import KvfoldError
from kvfold.eval.tasks import (
    graph_walk,
    infinitebench,
    key_value,
    languages,
    longbench,
    longbench_v2,
    loogle,
    maths,
    mt_bench,
    needle,
    own,
    paraphrased,
    perplexity,
    profile,
    related,
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
from kvfold.evidence.grouped import grouped

__all__ = [
    "NoData", "Question", "SampleRequest", "Task", "TaskSample", "UnreadableSample", "families",
    "select", "tasks",
]  # fmt: skip

_FILES = (
    ruler_niah, ruler_tracking, ruler_words, ruler_qa, needle, paraphrased, related, languages,
    key_value, profile, graph_walk, tool_session, perplexity, longbench, longbench_v2, loogle,
    infinitebench, scbench, maths, mt_bench, own,
)  # fmt: skip


PLUGINS = "kvfold.tasks"


def tasks() -> dict[str, Task]:
    """All tasks by name, kvfold's generated ones first, those of installed packages last."""
    own = {task.name: task for file in _FILES for task in file.TASKS}
    taken = frozenset(own) | {task.benchmark for task in own.values()}
    return own | {task.name: task for task in _installed(taken)}


@cache
def _installed(taken: frozenset[str]) -> tuple[Task, ...]:
    """Tasks of installed packages, read once; warns about a plugin that fails or takes a name."""
    found = dict[str, Task]()
    for plugin in metadata.entry_points(group=PLUGINS):
        try:
            members = _members(plugin.load())
            names = members.keys() | {task.benchmark for task in members.values()}
            if twice := sorted(taken & names | found.keys() & members.keys()):
                raise KvfoldError(f"the name {twice[0]!r} of a task or benchmark is taken")
            found |= members
        except Exception as problem:
            package = plugin.dist.name if plugin.dist else "an unknown package"
            said = " ".join(f"{type(problem).__name__}: {problem}".split())
            warnings.warn(
                f"the tasks of the plugin {plugin.name!r} ({plugin.value} of {package}) are left "
                f"out, as it cannot be loaded: {said}",
                stacklevel=3,
            )
    return tuple(found.values())


def _members(loaded: object) -> dict[str, Task]:
    """Tasks by name of a module with `TASKS`, of a tuple of tasks, or of one task."""
    held = getattr(loaded, "TASKS", loaded)
    members = [held] if isinstance(held, Task) else held
    if not isinstance(members, list | tuple) or not all(isinstance(one, Task) for one in members):
        raise KvfoldError("it names neither tasks nor a module whose TASKS are kvfold's Task")
    return {task.name: task for task in members}


def families() -> dict[str, list[Task]]:
    """Tasks by benchmark."""
    return grouped((task.benchmark, task) for task in tasks().values())


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
