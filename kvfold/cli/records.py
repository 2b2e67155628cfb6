# SPDX-License-Identifier: Apache-2.0
"""Messages of commands about records: a resumed file, and failed samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from kvfold.evidence.records import M, RecordFile
from kvfold.writing import make_folder

if TYPE_CHECKING:
    from kvfold.eval.run.cell_result import CellResult

# Reasons printed. A reason may name its sample, so there can be as many as samples.
REASONS = 10


def loaded(screen: Console, store: RecordFile[M]) -> list[M]:
    """The records so far; prints a note on resumed records and on a torn last line.

    Raises KvfoldError if the folder cannot be created.
    """
    make_folder(store.path.parent)
    found = store.load()
    if found.torn:
        screen.print(f"dropped a last line of {found.torn} bytes that was only half written")
    if found.records:
        screen.print(f"{store.path} holds {len(found.records)} records already")
    return found.records


def say_failures(screen: Console, results: Sequence[CellResult]) -> None:
    """Prints the distinct errors of samples with their counts, the most frequent first.

    Raises typer.Exit with code 1 if no sample of any cell has an answer.
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
