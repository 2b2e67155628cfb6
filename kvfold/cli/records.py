# SPDX-License-Identifier: Apache-2.0
"""What a command says about records: the file it goes on with, and the samples that failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from kvfold.errors import KvfoldError
from kvfold.jobs.records import M, Store

if TYPE_CHECKING:
    from kvfold.eval.run.result import Result

# Reasons that are printed; a reason may name the sample, so that there are as many as samples.
REASONS = 10


def loaded(screen: Console, store: Store[M]) -> list[M]:
    """The records so far, and a word about what a killed run left behind."""
    try:
        store.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise KvfoldError(f"cannot write {store.path}: {problem}") from problem
    found = store.load()
    if found.torn:
        screen.print(f"dropped a last line of {found.torn} bytes that was only half written")
    if found.records:
        screen.print(f"{store.path} holds {len(found.records)} records already")
    return found.records


def say_failures(screen: Console, results: Sequence[Result]) -> None:
    """Prints each distinct error of samples with its count, the most frequent first.

    Raises typer.Exit with code 1 where no sample of any cell has an answer.
    """
    counts = Counter[str]()
    for result in results:
        counts.update(result.errors)
    for reason, count in counts.most_common(REASONS):
        screen.print(Text(f"failed: {count} × {reason}", style="yellow"), soft_wrap=True)
    if rest := counts.most_common()[REASONS:]:
        total = sum(count for _, count in rest)
        screen.print(Text(f"failed: {total} × {len(rest)} other reasons", style="yellow"))
    if counts and not any(result.samples for result in results):
        raise typer.Exit(1)
