# SPDX-License-Identifier: Apache-2.0
"""`kvfold compress`: compresses documents into context files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvfold.cli import options
from kvfold.cli.console import kept_per_layer, progress, say_ask, stats_json, watched
from kvfold.errors import KvfoldError
from kvfold.evidence.outputs import check_apart
from kvfold.evidence.tables import size, table
from kvfold.loading import Loading, load
from kvfold.terminal import console, messages, print_json
from kvfold.writing import check_place, has_content

if TYPE_CHECKING:
    from kvfold.budget import Budget
    from kvfold.jobs.compress import CompressJob, CompressOptions, Job, RereadJob
    from kvfold.methods.stages.select.one_set import Rule


# The budget of methods that take one, if none is given.
BUDGET = "0.5"
# Parameters without a meaning for a context file, which is read again as it was made.
OF_TEXTS = (
    "method", "budget", "budgets", "keep_scores", "encoding", "compress", "seed", "ray",
    "special_tokens", "allow_longer", "system", "template",
)  # fmt: skip


@options.with_options(loading=options.loading)
def command(
    ctx: typer.Context,
    model: options.ModelName,
    documents: Annotated[
        list[Path],
        typer.Argument(
            help="Text files; - is standard input; a context file, with --level or --pages."
        ),
    ],
    out: Annotated[
        Path | None,
        options.out_option(
            help="File to write; for several documents, a folder.", show_default="*.kvfold"
        ),
    ] = None,
    method: options.MethodText = "kvzip",
    budget: Annotated[
        str | None,
        typer.Option(help=options.BUDGET_HELP, show_default=f"{BUDGET}, if the method takes one"),
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(help="Several budgets, such as 0.5,0.3: a file each, from one reading."),
    ] = None,
    keep_scores: Annotated[
        bool,
        typer.Option("--keep-scores", help="Keep scores, by which the context can shrink later."),
    ] = False,
    level: Annotated[
        options.LevelRule | None,
        typer.Option(help="One set of tokens for all heads, for engines' pages; reads twice."),
    ] = None,
    pages: Annotated[
        int | None,
        typer.Option(min=1, help="Whole pages of so many entries for each head, as vLLM's hold."),
    ] = None,
    codec: options.CodecText = None,
    encoding: options.Encoding = "utf-8",
    prefill_chunk: options.PrefillChunk = None,
    compress: options.Compress = "at_end",
    seed: Annotated[int, typer.Option(help="Seed of random methods.")] = 0,
    ray: Annotated[
        str | None,
        typer.Option(help="Compress several documents on the Ray cluster at this address."),
    ] = None,
    special_tokens: options.SpecialTokens = False,
    allow_longer: options.AllowLonger = False,
    force: options.Force = False,
    system: options.SystemText = None,
    template: options.TemplateArguments = None,
    as_json: options.Json = False,
    *,
    loading: Loading,
) -> None:
    """Compress documents into files; ask them questions later with `kvfold ask`.

    A context file's text is read again by the file's own method and budget, in another shape.
    """
    notes = messages(as_json)
    with notes.status("importing torch and transformers"):
        import kvfold
        from kvfold.cache.shrink import check_nested
        from kvfold.codecs.codec import codec_of
        from kvfold.contexts.context import check_reusable
        from kvfold.contexts.files.write import check_packable
        from kvfold.contexts.levelled import level_of, shaped
        from kvfold.generation.pieces import check_per_chunk
        from kvfold.jobs.compress import CompressJob, CompressOptions, check_options
        from kvfold.serve.context_folder import SUFFIX
    if pages is not None and level is not None:
        raise KvfoldError("--pages and --level are two shapes of one context: choose one")
    if any(path.suffix == SUFFIX for path in documents):
        job = _of_file(documents, out, pages or level, prefill_chunk, codec)
        why = "a context file is read again by a method and a budget of its own"
        options.refuse_given(ctx, OF_TEXTS, why)
        if _is_there(job.path, force):
            job.check_there()
        return _compress_one(notes, model, loading, job, as_json)
    # Refused here, before a large model is loaded.
    usual = BUDGET if kvfold.parse(method).takes_budget else None
    chosen, limit = options.checked(method, budget or usual)
    if pages is not None:
        chosen = shaped(chosen, pages)
    check_reusable(chosen)
    if compress == "per_chunk":
        check_per_chunk(chosen, prefill_chunk)
    if keep_scores:
        check_nested(chosen)
    if level is not None:
        if compress == "per_chunk" or keep_scores:
            raise KvfoldError("--level reads a whole text again: leave per_chunk and scores out")
        level_of(chosen, level)
    if codec is not None:
        codec_of(codec)
        check_packable(chosen)
    request = CompressOptions(
        chosen,
        limit,
        prefill_chunk,
        compress,
        seed,
        special_tokens,
        allow_longer,
        keep_scores,
        codec,
        level,
        system,
        options.template_arguments(template),
    )
    if budgets is not None:
        if len(documents) > 1 or ray is not None or budget is not None or level is not None:
            raise KvfoldError("--budgets is for one document, without --budget, --level and --ray")
        path, limits = _file(documents[0], out), _budgets_of(method, budgets)
        paths = _paths_of(path, list(limits))
        check_apart(paths, options.read_with(chosen, documents))
        text = options.read_text(documents[0], encoding)
        there = []
        for each, part in zip(paths, limits.values(), strict=True):
            if _is_there(each, force):
                there.append(CompressJob(text, each, replace(request, budget=part)))
                check_options(each, there[-1].options)
        _compress_to_budgets(notes, model, loading, text, path, limits, request, there, as_json)
    elif len(documents) == 1 and ray is None:
        path = _file(documents[0], out)
        check_apart([path], options.read_with(chosen, documents))
        text = options.read_text(documents[0], encoding)
        made = CompressJob(text, path, request)
        before = [made] if _is_there(path, force) else []
        if before:
            check_options(path, request)
        _compress_one(notes, model, loading, made, as_json, before)
    else:
        from kvfold.cli.compress_many import compress_many

        compress_many(notes, model, loading, documents, encoding, out, request, ray, force, as_json)


def _of_file(
    documents: list[Path],
    out: Path | None,
    shape: Rule | int | None,
    prefill_chunk: int | None,
    codec: str | None,
) -> RereadJob:
    """The job that reads a context file's text again.

    Raises KvfoldError unless it is one file, with a shape, and another file to write.
    """
    from kvfold.jobs.compress import RereadJob
    from kvfold.serve.context_folder import SUFFIX

    source = next(path for path in documents if path.suffix == SUFFIX)
    if len(documents) > 1 or shape is None:
        raise KvfoldError(
            f"{source} holds a method and a budget of its own: name one context file, with --level "
            "or --pages, and --out"
        )
    if out is None or out.resolve() == source.resolve():
        raise KvfoldError(f"{source} stays as it is: name the other file, --out PATH")
    return RereadJob(source, _file(source, out), shape, prefill_chunk, codec)


def _file(document: Path, out: Path | None) -> Path:
    """The path of a document's context file; raises KvfoldError if it cannot be written."""
    if out is None and str(document) == "-":
        raise KvfoldError("standard input has no name for the file: give --out")
    path = out or document.with_suffix(".kvfold")
    if os.path.isdir(path) and str(document) != "-":  # as with several documents
        path = path / document.with_suffix(".kvfold").name
    check_place(path)
    return path


def _is_there(path: Path, force: bool) -> bool:
    """True if a file is to be compared with the request, as it may not be replaced unseen.

    Raises KvfoldError for a file that is no context file.
    """
    from kvfold.contexts.files.format import check_context_place

    check_context_place(path)
    return has_content(path) and not force


def _compress_one(
    notes: Console,
    model: str,
    loading: Loading,
    job: Job,
    as_json: bool,
    there: Sequence[CompressJob] = (),
) -> None:
    """Compresses one document and prints kept entries and bytes.

    Raises KvfoldError for a file that is `there` of another model or of other tokens.
    """
    from kvfold.contexts.files.format import read_header
    from kvfold.jobs.compress import check_same

    network, tokenizer = load(model, loading, among_ranks=True)
    check_same(there, network, tokenizer)
    with progress(notes) as bar, watched(network, bar):
        context = job.made(network, tokenizer)
    path = job.path
    context.save(path, codec=job.codec)
    ranks = context.cache.ranks
    if ranks.rank > 0:
        return
    # From the file, as this rank holds a part of the heads only.
    kept = [[part.kept] for part in read_header(path).layers]
    stats = replace(context.stats(), kept=kept)
    if as_json:
        level = None if context.level is None else context.level.model_dump()
        found = {"file": path, "bytes": path.stat().st_size, "stats": stats_json(stats)}
        print_json(found if level is None else found | {"level": level})
        return
    where = f", first of {ranks.size} ranks" if ranks.size > 1 else ""
    rows = [("tokens", f"{stats.seen:,}")]
    rows += [(f"kept in {name}", count) for name, count in kept_per_layer(stats.layers, stats.kept)]
    rows += [
        ("kept of all entries", f"{stats.kept_fraction:.1%}"),
        (f"bytes in memory{where}", size(stats.nbytes)),
        *([("cold bytes in the file", size(stats.cold.host))] if stats.cold.host else []),
        (f"bytes of a full cache{where}", size(stats.nbytes_full)),
        *([("bytes of other layers", size(stats.other_bytes))] if stats.other_layers else []),
        ("bytes of the file", size(path.stat().st_size)),
    ]
    if context.level is not None:
        own, kl = context.level.own, context.level.kl
        rows.append(("entries of a head by itself", f"{own:,.1f}"))
        rows.append((f"mean KL to that, {context.level.measured} tokens", f"{kl:.3g}"))
    title = f"{stats.method}, budget {stats.budget}"
    console().print(table(title, "what", "measured", right=["measured"], rows=rows))
    say_ask(model, path)


def _budgets_of(method: str, texts: str) -> dict[str, Budget]:
    """Budgets by their texts in a list such as "0.5,0.3"; raises KvfoldError as a cache would."""
    found: dict[str, Budget] = {}
    for text in filter(None, map(str.strip, texts.split(","))):
        _, limit = options.checked(method, text)
        assert limit is not None
        found[text] = limit
    if not found:
        raise KvfoldError("--budgets names at least one budget, such as 0.5,0.3,0.2")
    return found


def _paths_of(path: Path, budgets: Sequence[str]) -> list[Path]:
    """Files beside `path`, named by their budgets: contract-0.5.kvfold."""
    return [path.with_name(f"{path.stem}-{budget}{path.suffix}") for budget in budgets]


def _compress_to_budgets(
    notes: Console,
    model: str,
    loading: Loading,
    text: str,
    path: Path,
    budgets: dict[str, Budget],
    request: CompressOptions,
    there: Sequence[CompressJob],
    as_json: bool,
) -> None:
    """Writes the files of `_paths_of` and prints kept entries and bytes.

    Raises KvfoldError for a file that is `there` of another model or of other tokens.
    """
    from kvfold.contexts.context import compress_each
    from kvfold.jobs.compress import check_same

    if request.compress == "per_chunk":
        raise KvfoldError("per_chunk compresses while reading, to one budget: leave out --budgets")
    network, tokenizer = load(model, loading)
    check_same(there, network, tokenizer)
    made: list[dict[str, Any]] = []
    with progress(notes) as bar, watched(network, bar):
        contexts = compress_each(
            network, tokenizer, text, request.method, list(budgets.values()), **request.reading
        )
        for file, context in zip(_paths_of(path, list(budgets)), contexts, strict=True):
            context.save(file, codec=request.codec)
            made.append({"file": file, "bytes": file.stat().st_size, "stats": context.stats()})
    if as_json:
        print_json([{**each, "stats": stats_json(each["stats"])} for each in made])
        return
    numbers = ("budget", "kept", "bytes of the file")
    shown = table(str(request.method), "file", *numbers, right=numbers)
    for each in made:
        kept = f"{each['stats'].kept_fraction:.1%}"
        shown.add_row(str(each["file"]), each["stats"].budget, kept, size(each["bytes"]))
    console().print(shown)
    say_ask(model, made[0]["file"])
