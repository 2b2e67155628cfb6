# SPDX-License-Identifier: Apache-2.0
"""Progress of the commands, and what several of them print."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from kvfold.terminal import console, messages

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvfold.cache.stats import Stats


def stats_json(stats: Stats) -> dict[str, Any]:
    """Statistics of a cache as a dict for JSON."""
    derived = {"nbytes": stats.nbytes, "ratio": stats.ratio, "kept_fraction": stats.kept_fraction}
    return dataclasses.asdict(stats) | derived | {"cold": stats.cold._asdict()}


# Seconds between two lines of progress off a terminal, and between two that say the same.
BETWEEN, AGAIN = 10.0, 60.0


class ProgressLines(Progress):
    """Progress off a terminal: a line on standard error where something has changed.

    There are at least `BETWEEN` seconds between two lines; the last one is said again after
    `AGAIN`.
    """

    def __init__(self, out: Console) -> None:
        super().__init__(console=out, disable=True)
        self._ended, self._said, self._at = Event(), "", 0.0
        self._writer = Thread(target=self._write, daemon=True)

    def start(self) -> None:
        """Begins to write lines."""
        self._writer.start()

    def stop(self) -> None:
        """Ends writing."""
        self._ended.set()
        self._writer.join()

    def _write(self) -> None:
        with suppress(OSError):  # nobody reads standard error
            while not self._ended.wait(1.0):
                self.say(self.get_time())

    def say(self, now: float) -> None:
        """Writes a line if it is time for one; `now` in seconds."""
        states = [_state(task) for task in self.tasks]
        since = now - self._at if self._said else BETWEEN
        if not states or since < (BETWEEN if states[-1] != self._said else AGAIN):
            return
        self._said, self._at = states[-1], now
        past = timedelta(seconds=int(self.tasks[-1].elapsed or 0))
        self.console.print(Text(f"{past} {self._said}"), soft_wrap=True)


def _state(task: Task) -> str:
    done = "" if task.total is None else f", {task.completed:,.0f} of {task.total:,.0f}"
    return f"{task.description}{done}"


def progress(out: Console, *further: ProgressColumn) -> Progress:
    """Progress with a description and `further` columns, by default the time.

    A bar, removed at the end, on `out`, or on standard error if only that is a terminal; lines
    there if none is.
    """
    shown = out if out.is_terminal else messages(True)
    if not shown.is_terminal:
        return ProgressLines(shown)
    columns = (TextColumn("{task.description}", markup=False), BarColumn())
    return Progress(*columns, *(further or [TimeElapsedColumn()]), console=shown, transient=True)


@contextmanager
def counted(out: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Progress of `total` items called `what`; yields a function that sets how many are done."""
    with progress(out, MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def kept_per_layer(
    layers: Sequence[int], kept: Sequence[Sequence[Sequence[int]]]
) -> list[tuple[str, str]]:
    """Lines such as ("layers 0-3", "461 per KV head") from `kept[L][B][H]`, equal layers merged.

    `layers` are the numbers of the compressible ones; others may lie between them.
    """
    spans = []
    for layer in kept:
        counts = [count for row in layer for count in row]
        spans.append((min(counts), max(counts)))
    lines = []
    for (low, high), group in groupby(zip(layers, spans, strict=True), key=lambda item: item[1]):
        numbers = [number for number, _ in group]
        first, last = numbers[0], numbers[-1]
        name = f"layer {first}" if first == last else f"layers {first}-{last}"
        if last - first >= len(numbers):
            name = f"{len(numbers)} of {name}"
        count = f"{low}" if low == high else f"{low} to {high}"
        lines.append((name, f"{count} per KV head"))
    return lines


@contextmanager
def watched(model: PreTrainedModel, bar: Progress) -> Iterator[None]:
    """Shows in the bar how many tokens the model has read."""
    from kvfold.hf.versions import given_cache

    task = bar.add_task("reading", total=None)

    def after_forward(module: Any, args: Any, options: dict[str, Any], output: Any) -> None:
        cache = given_cache(options)
        if cache is not None:
            bar.update(task, description=f"reading, {cache.get_seq_length():,} tokens so far")

    hook = model.register_forward_hook(after_forward, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def say_ask(model: str, path: Path) -> None:
    """Prints the command that asks a context file."""
    asked = shlex.join(["kvfold", "ask", model, str(path), "QUESTION"])
    console().print(f"{path}: ask it with `{asked}`.", soft_wrap=True)
