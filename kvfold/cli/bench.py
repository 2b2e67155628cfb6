# SPDX-License-Identifier: Apache-2.0
"""`kvfold bench`: time, bytes and peak memory of methods and of the full cache."""

from __future__ import annotations

import dataclasses
import re
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from kvfold.cli.console import progress
from kvfold.cli.options import Json, checked_seed, refuse_given
from kvfold.errors import KvfoldError
from kvfold.terminal import messages, print_json
from kvfold.writing import check_folder, check_replaceable

if TYPE_CHECKING:
    from kvfold.bench.lineup import Makers, Peer
    from kvfold.bench.record import BenchCell, RoundRecord
    from kvfold.bench.session import BenchSession
    from kvfold.bench.summary import BenchRow
    from kvfold.evidence.records import RecordFile

METHODS = (
    "snapkv", "pyramidkv:window=8", "knorm", "tova", "h2o", "d2o", "kvzip", "adakv",
    "snapkv + kivi:bits=4",
)  # fmt: skip
# Parameters without a meaning for `--throughput`.
NOT_THROUGHPUT = (
    "budgets", "lengths", "batches", "new_tokens", "peer", "peer_python", "compile",
)  # fmt: skip


def command(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help='"small", "llama-3-8b": random weights; "bundled", a folder, a hub id.'
        ),
    ],
    method: Annotated[
        list[str] | None,
        typer.Option(
            help='A method, such as "kvzip:chunk=2000"; may be repeated.', show_default="nine"
        ),
    ] = None,
    budgets: Annotated[str, typer.Option(help='Budgets: "0.2 512 1GiB".')] = "0.2",
    lengths: Annotated[str, typer.Option(help="Tokens of the prompt.")] = "4096",
    batches: Annotated[str, typer.Option(help="Rows in a batch.")] = "1",
    new_tokens: Annotated[int, typer.Option(min=1, help="Decode steps in each round.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of measurement.")] = 5,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads.", show_default="torch's own")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="the model's")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of random weights and of prompts.", callback=checked_seed)
    ] = 0,
    peer: Annotated[
        list[str] | None, typer.Option(help="kvpress or transformers-quantized; may be repeated.")
    ] = None,
    peer_python: Annotated[
        Path | None, typer.Option(help="Python interpreter of an environment with kvpress.")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Also each method with compiled decoding.")
    ] = False,
    throughput: Annotated[
        str | None,
        typer.Option(
            help='"256+1024": tokens/s of prompt+generation at the largest batch under a cap.'
        ),
    ] = None,
    memory_cap: Annotated[
        str, typer.Option(help="Bytes of weights and cache together, for --throughput.")
    ] = "2GiB",
    out: Annotated[
        Path, typer.Option("--out", "-o", dir_okay=False, help="File of records; a rerun resumes.")
    ] = Path("kvfold-bench.jsonl"),
    as_json: Json = False,
) -> None:
    """Measure methods beside the full cache, in turns: time, bytes, peak memory."""
    _check_given(ctx, throughput, peer or [])
    _check_out(out, picture=throughput is None)
    screen = messages(as_json)
    with screen.status("importing torch and transformers"):
        import torch

        from kvfold.bench.lineup import compiled, labels, makers
        from kvfold.bench.models import BenchModel
        from kvfold.bench.peers import peers
        from kvfold.bench.record import BenchCell, RoundRecord
        from kvfold.bench.session import BenchSession
        from kvfold.evidence.records import RecordFile
        from kvfold.generation.static.compiler import compiling
    if threads is not None:
        torch.set_num_threads(threads)
    wanted = labels(method or METHODS, words(budgets))
    subject = BenchModel.of(model, dtype, seed)
    if throughput is not None:
        from kvfold.cli.throughput import measure_throughput

        pairs = words(throughput)
        measure_throughput(
            screen, subject, method or METHODS, pairs, memory_cap, repeats, out, as_json
        )
        return
    source = subject.source
    cells = [
        BenchCell(**source.model_dump(), length=length, batch=batch, new_tokens=new_tokens)
        for length in numbers(lengths)
        for batch in numbers(batches)
    ]
    if compile:
        able, reasons = compiled(subject, wanted)
        for label, reason in reasons.items():
            screen.print(Text(f"left out: {label}: {reason}", style="yellow"))
    made = makers(subject, [*wanted, *(able if compile else [])])
    store = RecordFile(out, RoundRecord)
    settings = compiling() if compile else nullcontext()
    with peers(subject, peer or [], peer_python) as invited, settings:
        for each in invited:
            made |= each.makers(wanted)
        session = BenchSession.of(subject, {each.name: each.setup for each in invited})
        work = {cell: _able(screen, cell, made, invited) for cell in cells}
        _measure(screen, store, session, work, repeats)
    _show(screen, store, cells, as_json)
    if source.config is None:  # random weights have no answers
        named = ",".join(method or METHODS)
        used = shlex.join(["kvfold", "check", model, "PROMPTS.jsonl", "--methods", named])
        screen.print(Text(f"next, the distance to the full cache: {used}"), soft_wrap=True)


def _check_given(ctx: typer.Context, throughput: str | None, peers: list[str]) -> None:
    """Raises KvfoldError if options without a meaning for this measurement were given."""
    if throughput is not None:
        why = "--throughput sets lengths, budgets and batches, and decodes eagerly, without peers"
        refuse_given(ctx, NOT_THROUGHPUT, why)
        return
    refuse_given(ctx, ["memory_cap"], "without --throughput, no memory is capped")
    if "kvpress" not in peers:
        refuse_given(ctx, ["peer_python"], "without --peer kvpress, no other Python runs")


def _check_out(out: Path, picture: bool) -> None:
    """Raises KvfoldError if the `picture` of a new file of records would replace another file."""
    check_folder(out.parent)
    if out.suffix == ".png":
        raise KvfoldError(f"{out} is where the picture goes: name the records, such as bench.jsonl")
    drawn = out.with_suffix(".png")
    check_replaceable(out, *([drawn] if picture else []))
    if picture and drawn.exists() and not out.exists():
        raise KvfoldError(
            f"{drawn} is there, without records of which it could be the picture: choose another "
            "--out, or remove it"
        )


def words(text: str) -> list[str]:
    """The distinct words of `text`, split at spaces and commas; raises KvfoldError for none.

    A number and its unit are one word: "10 %" is "10%".
    """
    joined = re.sub(r"(?<=\d)\s+(?=(%|[KMGT]?I?B\b))", "", text, flags=re.IGNORECASE)
    found = [part for part in re.split(r"[\s,]+", joined) if part]
    if not found:
        raise KvfoldError("an empty list: name at least one")
    return list(dict.fromkeys(found))


def numbers(text: str) -> list[int]:
    """The positive whole numbers in `text`; raises KvfoldError for anything else."""
    found = words(text)
    wrong = [part for part in found if not part.isdecimal() or int(part) < 1]
    if wrong:
        raise KvfoldError(f"{wrong[0]!r} is no positive whole number")
    return [int(part) for part in found]


def _able(screen: Console, cell: BenchCell, makers: Makers, invited: list[Peer]) -> Makers:
    """The participants that can run `cell`; prints the others with the reason."""
    able = dict(makers)
    for label in makers:
        for reason in filter(None, (each.left_out(label, cell) for each in invited)):
            screen.print(Text(f"left out: {label} at {cell}: {reason}", style="yellow"))
            del able[label]
    return able


def _measure(
    screen: Console,
    store: RecordFile[RoundRecord],
    session: BenchSession,
    work: dict[BenchCell, Makers],
    repeats: int,
) -> None:
    """Runs and stores the rounds that the file does not hold yet."""
    from kvfold.bench.participants import AGAIN, ParticipantLabel
    from kvfold.bench.record import check_setup, check_shape
    from kvfold.bench.session import missing_rounds
    from kvfold.cli.records import loaded

    records = loaded(screen, store)
    check_setup(records, session.setups, store.path)
    check_shape(records, work, session.shape, store.path)
    noise = ParticipantLabel("baseline", AGAIN)
    missing = {
        cell: missing_rounds(records, cell, [noise, *makers], repeats)
        for cell, makers in work.items()
    }
    rounds = sum(max(of_cell.values(), default=0) for of_cell in missing.values())
    with progress(screen) as bar:
        task = bar.add_task("starting", total=rounds)

        def note(text: str) -> None:
            bar.update(task, description=text)

        for cell, of_cell in missing.items():
            for made in session.rounds(cell, work[cell], of_cell, note):
                store.add(made)
                bar.advance(task)


def _as_json(row: BenchRow) -> dict[str, Any]:
    """A participant's medians, and its ratios to the full cache with quartiles, as a dict."""
    return dataclasses.asdict(row) | {"cell": row.cell.model_dump(), "label": str(row.label)}


def _show(
    screen: Console, store: RecordFile[RoundRecord], cells: list[BenchCell], as_json: bool
) -> None:
    """Prints tables or JSON of these cells, and writes a picture beside the records."""
    from kvfold.bench.picture import figure
    from kvfold.bench.summary import rows
    from kvfold.bench.table import tables
    from kvfold.evidence.pictures import save

    records = [record for record in store.load().records if record.cell in cells]
    if as_json:
        print_json([_as_json(row) for row in rows(records)])
    for shown in () if as_json else tables(rows(records)):
        screen.print(shown)
    for side in dict.fromkeys(record.side for record in records if record.label.is_peer_full):
        own = [record for record in records if record.side == side]
        for shown in tables(rows(own, side), f"{side}'s own full cache"):
            screen.print(shown)
    for kernel in dict.fromkeys(f"{r.cell}: {r.baseline}" for r in records):
        screen.print(Text(f"full cache of {kernel}"))
    commits = list(dict.fromkeys(record.commit for record in records))
    if len(commits) > 1:
        screen.print(f"recorded at several commits: {', '.join(map(str, commits))}")
    picture = store.path.with_suffix(".png")
    save(figure(rows(records)), picture)
    screen.print(Text(f"records: {store.path.resolve()}\npicture: {picture.resolve()}"))
