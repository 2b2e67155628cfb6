# SPDX-License-Identifier: Apache-2.0
"""Files by codec: bytes, KL to the full cache, and times.

    python -m docs.results.codec.measure MODEL OUT.jsonl BOOK.txt ... --basis BASIS

Passages and KL are those of docs/results/match/measure.py. Each passage is read once for the full
cache, and once by `kvzip`. Rows of OUT that are there are not measured again. BASIS is a file of
`kvfold fit --codec kvtc`, fitted on other texts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from pydantic import BaseModel, ConfigDict

import kvfold
from docs.results.match.measure import Document, Judge
from kvfold.cache.cache import CompressedCache
from kvfold.contexts.context import Context
from kvfold.contexts.files.coding import decoded, rotations_of
from kvfold.contexts.files.format import opened
from kvfold.evidence.records import RecordFile
from kvfold.generation.reading import read_on
from kvfold.hf.chat_template import PromptFrame, token_ids
from kvfold.loading import Loading, load

HALF = 2  # bytes of a number of 16 bits
BASE = ("kivi:bits=4", None)  # whose KL files are held to


class Row(BaseModel):
    """One document, method, kept part and codec (None: in memory).

    `part` is that of a file in keys and values of 16 bits a number, or of entries in memory in a
    full cache of the model's dtype. Times are the CPU's; a file is decoded without its reading.
    """

    model_config = ConfigDict(frozen=True)

    text: str
    tokens: int
    method: str
    kept: float | None
    codec: str | None
    kl: float
    agree: float
    right: int
    asked: int
    part: float
    save_seconds: float
    load_seconds: float
    decode_seconds: float

    @property
    def cell(self) -> tuple[str, str | None]:
        """Method and codec."""
        return self.method, self.codec


class Cell(NamedTuple):
    """A method, the part of the entries that it keeps, and a codec (None: in memory)."""

    method: str
    kept: float | None
    codec: str | None


def cells(ratios: list[str], budget: float) -> Iterator[Cell]:
    """All cells; kvtc without its file, which is of one machine."""
    yield from (Cell(f"kivi:bits={bits}", None, None) for bits in (4, 2))
    coded = [f"kvtc:ratio={ratio}" for ratio in ratios]
    yield from (Cell("full", None, codec) for codec in ("zstd", "kivi4", *coded))
    of_heads = ["kivi4", *(f"kvtc:ratio={ratio}" for ratio in (3, 4, 6, 8))]
    yield from (Cell("kvzip", budget, codec) for codec in (None, *of_heads))
    of_all = ["kivi4", *(f"kvtc:ratio={ratio}" for ratio in (8, 20, 32, 48))]
    yield from (Cell("kvzip + level", budget, codec) for codec in (None, *of_all))


class Passage(NamedTuple):
    """A passage, what the full cache says of it, and its numbers."""

    document: Document
    judge: Judge
    full: int


@torch.no_grad()
def rows(
    model: Any, tokenizer: Any, path: Path, tokens: int, basis: Path, wanted: list[Cell]
) -> Iterator[Row]:
    """The rows of one book."""
    book = " ".join(path.read_text(errors="ignore").split())
    document = Document.of(tokenizer, book, tokens, sum(path.stem.encode()))
    frame = PromptFrame.of(tokenizer)
    ids = token_ids(tokenizer, frame.before, document.text)
    full = read(model, tokenizer, ids, "full", [Cell("full", None, None)])["full"]
    numbers = sum(each.numel() for state in full.states for each in state.stored().dense())
    passage = Passage(document, Judge.of(model, full, document), numbers)
    for reader in ("full", "kvzip"):
        own = [cell for cell in wanted if cell.method.startswith("kvzip") == (reader == "kvzip")]
        caches = read(model, tokenizer, ids, reader, own) if own else {}
        for cell in own:
            context = Context(model, tokenizer, caches[cell.method], frame, ids)
            yield Row(
                text=path.stem,
                tokens=ids.shape[1],
                **cell._asdict(),
                **measured(context, cell.codec, basis, passage),
            )


def read(
    model: Any, tokenizer: Any, ids: torch.Tensor, reader: str, wanted: list[Cell]
) -> dict[str, CompressedCache]:
    """The caches of the methods of `wanted`, from one reading."""
    cache = CompressedCache(model, reader, wanted[0].kept, tokenizer=tokenizer)
    budgets = {cell.method: cell.kept for cell in wanted}
    with cache.reading():
        read_on(model, cache, ids, None, ids.shape[1])
        return {method: cache.to_budget(kept, method) for method, kept in budgets.items()}


def measured(context: Context, codec: str | None, basis: Path, passage: Passage) -> dict[str, Any]:
    """Bytes, times and distances of a context in memory, or in a file."""
    model, times, cache = context.model, [0.0] * 3, context.cache
    part = cache.stats().nbytes / (passage.full * model.dtype.itemsize)
    if codec is not None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "context.kvfold"
            named = codec.replace(":", f":file={basis},")
            begun = time.process_time()
            context.save(file, codec=named)
            times[0] = time.process_time() - begun
            part = file.stat().st_size / (HALF * passage.full)
            begun = time.process_time()
            with opened(file) as found:
                decoded(found, rotations_of(cache))
            times[2] = time.process_time() - begun
            begun = time.process_time()
            cache = kvfold.load(file, model, context.tokenizer).cache
            times[1] = time.process_time() - begun
    return dict(
        part=part,
        save_seconds=times[0],
        load_seconds=times[1],
        decode_seconds=times[2],
        **passage.judge(model, cache, passage.document),
    )


class Mean(BaseModel):
    """A cell's means over texts."""

    method: str
    codec: str | None
    kept: float | None
    kl: float
    part: float
    right: int
    asked: int
    texts: int
    load_seconds: float

    @property
    def name(self) -> str:
        """The context, as a table has it."""
        return f"`{self.method}`" + (f", {self.kept:g}" if self.kept is not None else "")


def means(rows: Sequence[Row]) -> list[Mean]:
    """One of each cell, in the rows' order."""
    return [_mean([row for row in rows if row.cell == cell]) for cell in _cells(rows)]


def _cells(rows: Sequence[Row]) -> list[tuple[str, str | None]]:
    return list(dict.fromkeys(row.cell for row in rows))


def _mean(own: Sequence[Row]) -> Mean:
    of_texts = {
        name: statistics.mean(getattr(row, name) for row in own)
        for name in ("kl", "part", "load_seconds")
    }
    sums = {name: sum(getattr(row, name) for row in own) for name in ("right", "asked")}
    method, codec, kept = own[0].method, own[0].codec, own[0].kept
    return Mean(method=method, codec=codec, kept=kept, texts=len(own), **of_texts, **sums)


def contexts(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each cell: bytes, KL, answers, and the time of loading."""
    yield "| context | codec | part | KL | answers | loading |"
    yield "|---|---|---|---|---|---|"
    for mean in means(rows):
        codec = "none, in memory" if mean.codec is None else f"`{mean.codec}`"
        loading = "" if mean.codec is None else f"{mean.load_seconds:.1f} s"
        yield (
            f"| {mean.name} | {codec} | 1/{1 / mean.part:.1f} | {mean.kl:.4f} "
            f"| {mean.right} of {mean.asked} | {loading} |"
        )


def equal_kl(rows: Sequence[Row]) -> Iterator[str]:
    """The smallest file of each codec whose KL is at most that of `BASE`, and of twice that."""
    found = means(rows)
    base = next(mean for mean in found if (mean.method, mean.codec) == BASE)
    limits = [factor * base.kl for factor in (1, 2, 4, 8)]
    yield "| context | codec | " + " | ".join(f"KL ≤ {limit:.4f}" for limit in limits) + " |"
    yield "|---|---|" + "---|" * len(limits)
    kinds = dict.fromkeys((m.name, m.codec.partition(":")[0]) for m in found if m.codec)
    for name, kind in kinds:
        own = [m for m in found if m.name == name and (m.codec or "").partition(":")[0] == kind]
        best = [min((m.part for m in own if m.kl <= limit), default=None) for limit in limits]
        cells = ["none" if part is None else f"1/{1 / part:.1f}" for part in best]
        yield f"| {name} | `{kind}` | " + " | ".join(cells) + " |"


def tables(rows: Sequence[Row]) -> str:
    """All tables, in Markdown."""
    return "\n\n".join("\n".join(made(rows)) for made in (contexts, equal_kl))


def main(
    model: str,
    out: Path,
    books: list[Path],
    basis: Annotated[Path, typer.Option(help="A file of kvfold fit --codec kvtc.")],
    tokens: Annotated[int, typer.Option(help="Tokens of a document, about.")] = 4000,
    ratios: Annotated[str, typer.Option(help="Of kvtc.")] = "8,12,16,20,24,32",
    budget: Annotated[float, typer.Option(help="Of kvzip before a codec.")] = 0.3,
) -> None:
    """Measures what is missing, and prints the tables."""
    torch.set_num_threads(1)
    network, tokenizer = load(model, Loading(device="cpu"))
    records = RecordFile(out, Row)
    known = {(row.text, row.method, row.codec) for row in records.load().records}
    every = list(cells(ratios.split(","), budget))
    for book in books:
        missing = [cell for cell in every if (book.stem, cell.method, cell.codec) not in known]
        for row in rows(network, tokenizer, book, tokens, basis, missing) if missing else ():
            records.add([row])
            print(row.model_dump_json(), flush=True)
    print(tables(records.load().records))


if __name__ == "__main__":
    typer.run(main)
