# SPDX-License-Identifier: Apache-2.0
"""`kvfold compress`: reads documents once and writes what is kept of each to a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from kvfold.cli.console import console, kept_per_layer, progress, size, table
from kvfold.cli.run import Compress, load
from kvfold.errors import KvfoldError

if TYPE_CHECKING:
    from kvfold.compat import PreTrainedModel
    from kvfold.files.many import Settings


def command(
    model: Annotated[str, typer.Argument(help='A folder, a hub id, or "bundled".')],
    documents: Annotated[list[Path], typer.Argument(help="Text files.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The file to write; of several documents, the folder.",
            show_default="*.kvfold",
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help='A name of `kvfold methods`, or "snapkv:window=16".')
    ] = "kvzip",
    budget: Annotated[
        str | None,
        typer.Option(help='What to keep: "512" tokens, "0.2" or "20%" of them, "2GiB".'),
    ] = None,
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Read the document in pieces of this many tokens.")
    ] = None,
    compress: Annotated[
        Compress,
        typer.Option(help="When: at the document's end, or per_chunk, which bounds the memory."),
    ] = "at_end",
    seed: Annotated[int, typer.Option(help="Fixes the choice of random methods.")] = 0,
    ray: Annotated[
        str | None,
        typer.Option(help="Share several documents out over the Ray cluster at this address."),
    ] = None,
) -> None:
    """Compress documents into files; ask them questions later with `kvfold ask`."""
    shown = console()
    with shown.status("importing torch and transformers"):
        import kvfold
        from kvfold.files.many import Settings
    # Refused here, before a large model is loaded.
    chosen = kvfold.parse(method)
    limit = None if budget is None else kvfold.Budget.of(budget)
    settings = Settings(chosen, limit, prefill_chunk, compress, seed)
    if len(documents) == 1 and ray is None:
        _compress_one(shown, model, documents[0], out, settings)
    else:
        from kvfold.cli.compress_many import compress_many

        compress_many(shown, model, documents, out, settings, ray)


def _compress_one(
    shown: Console, model: str, document: Path, out: Path | None, settings: Settings
) -> None:
    """One document, with a word about what is kept of it."""
    from kvfold.files.format import read_header

    text = read_text(document)
    path = out or document.with_suffix(".kvfold")
    if path.is_dir() or not path.parent.is_dir():
        what = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise KvfoldError(f"cannot write {path}: {what}")
    network, tokenizer = load(model, among_ranks=True)
    with progress(shown) as bar, _watched(network, bar):
        context = settings.compressed(network, tokenizer, text)
    context.save(path)
    ranks = context.cache.ranks
    if ranks.rank > 0:
        return
    # Of all heads, whichever rank holds them.
    kept = [[part.kept] for part in read_header(path).layers]
    stats = replace(context.stats(), kept=kept)
    where = f", first of {ranks.size} ranks" if ranks.size > 1 else ""
    rows = [("tokens", f"{stats.seen:,}")]
    rows += [(f"kept in {name}", count) for name, count in kept_per_layer(stats.kept)]
    rows += [
        ("kept of all entries", f"{stats.kept_fraction:.1%}"),
        (f"bytes in memory{where}", size(stats.nbytes)),
        (f"bytes of a full cache{where}", size(stats.nbytes_full)),
        ("bytes of the file", size(path.stat().st_size)),
    ]
    made = table(f"{stats.method}, budget {stats.budget}", "what", "measured", right=["measured"])
    for row in rows:
        made.add_row(*row)
    shown.print(made)
    shown.print(f"{path}: ask it with `kvfold ask {model} {path} QUESTION`.", soft_wrap=True)


def read_text(path: Path) -> str:
    """The text of a file; raises KvfoldError where there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise KvfoldError(f"cannot read {path}: {problem}") from problem
    if not text.strip():
        raise KvfoldError(f"{path} is empty")
    return text


@contextmanager
def _watched(model: PreTrainedModel, bar: Progress) -> Iterator[None]:
    """Counts the tokens that the model has read."""
    task = bar.add_task("reading", total=None)

    def after_forward(module: Any, args: Any, options: dict[str, Any], output: Any) -> None:
        cache = options.get("past_key_values")
        if cache is not None:
            bar.update(task, description=f"reading, {cache.get_seq_length():,} tokens so far")

    hook = model.register_forward_hook(after_forward, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
