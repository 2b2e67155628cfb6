# SPDX-License-Identifier: Apache-2.0
"""`kvfold compress` of several documents; existing context files are not made again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from kvfold.cli.console import counted, say_ask, stats_json
from kvfold.cli.options import read_text
from kvfold.contexts.files.format import check_context_place
from kvfold.errors import KvfoldError
from kvfold.evidence.tables import size, table
from kvfold.jobs.compress import (
    CompressJob,
    CompressOptions,
    CompressResult,
    Job,
    check_options,
    check_same,
    check_texts,
    worker_spec,
)
from kvfold.jobs.executor import RunJobs, here
from kvfold.loading import Loading, load, load_tokenizer
from kvfold.terminal import console, print_json
from kvfold.writing import check_folder, has_content


def compress_many(
    notes: Console,
    model: str,
    loading: Loading,
    documents: Sequence[Path],
    encoding: str,
    out: Path | None,
    options: CompressOptions,
    ray: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Compresses each document whose context file is missing or older; a rerun resumes.

    A document that fails is reported at the end, with exit code 1. Raises KvfoldError if an
    existing file was made with other options or fits, of other tokens, or with another model; with
    Ray models are not compared, as none is loaded here. With `force` every document is compressed.
    """
    if any(str(document) == "-" for document in documents):
        raise KvfoldError("standard input is one document: give no other, and no --ray")
    if out is not None and not os.path.isdir(out):
        raise KvfoldError(f"cannot write into {out}: there is no such folder")
    paths = [(out or path.parent) / f"{path.stem}.kvfold" for path in documents]
    twice = {path for path in paths if paths.count(path) > 1}
    if twice:
        raise KvfoldError(f"several documents would become {min(twice)}: rename them")
    pairs = list(zip(documents, paths, strict=True))
    for path in paths:
        check_context_place(path)
    for folder in {path.parent for path in paths}:
        check_folder(folder)
    there = {path for document, path in pairs if not force and _is_newer(document, path)}
    waiting = [(document, path) for document, path in pairs if path not in there]
    for path in sorted(there):
        check_options(path, options)
    jobs = [
        CompressJob(read_text(text, encoding), path.resolve(), options) for text, path in waiting
    ]
    done_before = [
        CompressJob(read_text(text, encoding), path, options)
        for text, path in pairs
        if path in there
    ]
    workers = _workers(model, loading, done_before, ray)
    if there:
        notes.print(f"{len(there)} of {len(pairs)} files are there already")
    found: list[CompressResult] = []
    with counted(notes, "documents", len(jobs)) as done:
        for made in workers(jobs):
            found.append(made)
            done(len(found))
    if as_json:
        print_json([_as_json(made) for made in found])
    else:
        _show(console(), found)
        written = [made.path for made in found if made.stats is not None]
        if written:
            say_ask(model, min(written))
    if any(made.why for made in found):
        raise typer.Exit(1)


def _workers(
    model: str, loading: Loading, done_before: Sequence[CompressJob], ray: str | None
) -> RunJobs[Job, CompressResult]:
    """Workers that compress, on Ray or here.

    Raises ContextFileError if the file of a job `done_before` is of another model, and KvfoldError
    if it is of other tokens.
    """
    doing = worker_spec(model, loading)
    if ray is not None:
        from kvfold.jobs.ray_cluster import cluster

        if done_before:
            check_texts(done_before, load_tokenizer(model, loading))
        return cluster(doing, ray, None)
    network, tokenizer = load(model, loading)
    check_same(done_before, network, tokenizer)
    return here(doing, network, tokenizer)


def _is_newer(document: Path, file: Path) -> bool:
    """True if the file has content and is not older than the document."""
    if not (has_content(file) and document.is_file()):
        return False
    return file.stat().st_mtime >= document.stat().st_mtime


def _as_json(made: CompressResult) -> dict[str, Any]:
    stats = None if made.stats is None else stats_json(made.stats)
    return {"file": made.path, "stats": stats, "error": made.why}


def _show(shown: Console, found: Sequence[CompressResult]) -> None:
    numbers = ("tokens", "kept", "bytes of the file")
    made_table = table("compressed", "file", *numbers, right=numbers)
    for made in sorted(found, key=lambda made: made.path):
        if made.stats is not None:
            kept, taken = made.stats.kept_fraction, size(made.path.stat().st_size)
            made_table.add_row(made.path.name, f"{made.stats.seen:,}", f"{kept:.1%}", taken)
    if made_table.row_count:
        shown.print(made_table)
    for made in found:
        if made.why:
            shown.print(Text(f"{made.path.name}: {made.why}", style="red"))
