# SPDX-License-Identifier: Apache-2.0
"""`kvfold compress --budgets`: one document, read once, as a context file for each budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvfold.cli.console import progress, say_ask, stats_json, watched
from kvfold.cli.options import checked
from kvfold.errors import KvfoldError
from kvfold.evidence.tables import size, table
from kvfold.loading import Loading, load
from kvfold.terminal import console, print_json

if TYPE_CHECKING:
    from kvfold.budget import Budget
    from kvfold.jobs.compress import CompressJob, CompressOptions


def budgets_of(method: str, texts: str) -> dict[str, Budget]:
    """Budgets by their texts in a list such as "0.5,0.3"; raises KvfoldError as a cache would."""
    found: dict[str, Budget] = {}
    for text in filter(None, map(str.strip, texts.split(","))):
        _, limit = checked(method, text)
        assert limit is not None
        found[text] = limit
    if not found:
        raise KvfoldError("--budgets names at least one budget, such as 0.5,0.3,0.2")
    return found


def paths_of(path: Path, budgets: Sequence[str]) -> list[Path]:
    """Files beside `path`, named by their budgets: contract-0.5.kvfold."""
    return [path.with_name(f"{path.stem}-{budget}{path.suffix}") for budget in budgets]


def compress_to_budgets(
    notes: Console,
    model: str,
    loading: Loading,
    text: str,
    path: Path,
    budgets: dict[str, Budget],
    options: CompressOptions,
    there: Sequence[CompressJob],
    as_json: bool,
) -> None:
    """Writes the files of `paths_of` and prints kept entries and bytes.

    Raises KvfoldError for a file that is `there` of another model or of other tokens.
    """
    from kvfold.contexts.context import compress_each
    from kvfold.jobs.compress import check_same

    if options.compress == "per_chunk":
        raise KvfoldError("per_chunk compresses while reading, to one budget: leave out --budgets")
    network, tokenizer = load(model, loading)
    check_same(there, network, tokenizer)
    made: list[dict[str, Any]] = []
    with progress(notes) as bar, watched(network, bar):
        contexts = compress_each(
            network, tokenizer, text, options.method, list(budgets.values()), **options.reading
        )
        for file, context in zip(paths_of(path, list(budgets)), contexts, strict=True):
            context.save(file, codec=options.codec)
            made.append({"file": file, "bytes": file.stat().st_size, "stats": context.stats()})
    if as_json:
        print_json([{**each, "stats": stats_json(each["stats"])} for each in made])
        return
    numbers = ("budget", "kept", "bytes of the file")
    shown = table(str(options.method), "file", *numbers, right=numbers)
    for each in made:
        kept = f"{each['stats'].kept_fraction:.1%}"
        shown.add_row(str(each["file"]), each["stats"].budget, kept, size(each["bytes"]))
    console().print(shown)
    say_ask(model, made[0]["file"])
