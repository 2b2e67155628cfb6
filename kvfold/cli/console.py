# SPDX-License-Identifier: Apache-2.0
"""Formats of the commands: progress bars, tables, sizes and durations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from kvfold.cache.stats import Stats


def stats_json(stats: Stats) -> dict[str, Any]:
    """Statistics of a cache as a dict for JSON."""
    derived = {"nbytes": stats.nbytes, "ratio": stats.ratio, "kept_fraction": stats.kept_fraction}
    return dataclasses.asdict(stats) | derived


def progress(out: Console) -> Progress:
    """A progress bar with a description, removed at the end."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=out, transient=True)


@contextmanager
def counted(out: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of `total` items called `what`; yields a function that sets how many are done."""
    said = TextColumn("{task.description}", markup=False)
    columns = (said, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def table(title: str | None, *columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table; the first column never wraps, columns in `right` are right-aligned."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        made.add_column(column, justify=justify, no_wrap=column == columns[0], overflow="fold")
    return made


def size(count: int) -> str:
    """A number of bytes as text, in B, KiB, MiB, GiB or TiB."""
    amount, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{amount:.0f} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def seconds(duration: float) -> str:
    """A duration in seconds as text, in s or ms."""
    return f"{duration:.2f} s" if duration >= 1 else f"{duration * 1000:.1f} ms"


def kept_per_layer(kept: Sequence[Sequence[Sequence[int]]]) -> list[tuple[str, str]]:
    """Lines such as ("layers 0-3", "461 per KV head") from `kept[L][B][H]`, equal layers merged."""
    spans = []
    for layer in kept:
        counts = [count for row in layer for count in row]
        spans.append((min(counts), max(counts)))
    lines = []
    for (low, high), group in groupby(enumerate(spans), key=lambda item: item[1]):
        indices = [index for index, _ in group]
        first, last = indices[0], indices[-1]
        name = f"layer {first}" if first == last else f"layers {first}-{last}"
        count = f"{low}" if low == high else f"{low} to {high}"
        lines.append((name, f"{count} per KV head"))
    return lines
