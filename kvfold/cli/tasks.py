# SPDX-License-Identifier: Apache-2.0
"""`kvfold tasks`: tasks of `kvfold eval`, and the data they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from kvfold.cli.options import Json
from kvfold.evidence.tables import table
from kvfold.terminal import console, messages, print_json

if TYPE_CHECKING:
    from kvfold.eval.tasks import NoData, Task


def command(
    names: Annotated[
        list[str] | None, typer.Argument(help="Benchmarks or tasks to show.", show_default="all")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the tasks of `kvfold eval` by benchmark; for those named, metrics and data as well."""
    with messages(as_json).status("importing torch and transformers"):
        from kvfold.eval.tasks import families, select
    if as_json:
        every = (task for family in families().values() for task in family)
        print_json([_as_json(task) for task in (select(names) if names else every)])
    elif names:
        _details(select(names))
    else:
        _overview(families())


def _overview(families: dict[str, list[Task]]) -> None:
    shown = table(None, "benchmark", "data", "tasks")
    for name, tasks in families.items():
        without = sum(_data(task) is None for task in tasks)
        data = "generated" if without == len(tasks) else "--data" if not without else "some --data"
        shown.add_row(name, data, ", ".join(task.name for task in tasks))
    out = console()
    out.print(shown)
    out.print("Scores and data of a benchmark: kvfold tasks longbench.")


def _details(tasks: Sequence[Task]) -> None:
    shown = table(None, "task", "what", "score", "data")
    for task in tasks:
        data = _data(task)
        wanted = "generated" if data is None else data.wanted
        shown.add_row(task.name, Text(task.summary), task.metric or "-", wanted)
    out = console()
    out.print(shown)
    for benchmark, hub in dict.fromkeys((task.benchmark, _hub(task)) for task in tasks):
        if hub is not None:
            out.print(f"All of {benchmark} from the hub: --data {hub}", soft_wrap=True)


def _as_json(task: Task) -> dict[str, Any]:
    data = _data(task)
    return {
        "name": task.name,
        "benchmark": task.benchmark,
        "summary": task.summary,
        "group": task.group,
        "metric": task.metric,
        "source": task.source,
        "data": None if data is None else data.wanted,
        "hub": _hub(task),
    }


def _data(task: Task) -> NoData | None:
    """The data that a task needs from `--data`; None if its samples are generated."""
    from kvfold.eval.tasks import SampleRequest

    return task.missing_data(SampleRequest())


def _hub(task: Task) -> str | None:
    data = _data(task)
    return None if data is None else data.hub
