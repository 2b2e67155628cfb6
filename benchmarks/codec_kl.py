# SPDX-License-Identifier: Apache-2.0
"""Files by codec: bytes, KL to the full cache, and times.

    python benchmarks/codec_kl.py MODEL OUT.jsonl BOOK.txt ... --basis BASIS

Passages and KL are those of match_kl.py. Rows of OUT that are there are not measured again. BASIS
is a file of `kvfold fit --codec kvtc`, fitted on other texts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from match_kl import Document, Judge
from pydantic import BaseModel, ConfigDict

import kvfold
from kvfold.jobs.records import RecordFile
from kvfold.loading import Loading, load


class Row(BaseModel):
    """One document, method and codec.

    `part` is that of a file in keys and values of 16 bits a number, or of entries in memory in a
    full cache of the model's dtype. Times are the CPU's.
    """

    model_config = ConfigDict(frozen=True)

    text: str
    tokens: int
    method: str
    codec: str | None
    kl: float
    agree: float
    right: int
    asked: int
    part: float
    save_seconds: float
    load_seconds: float

    @property
    def key(self) -> tuple[str, int, str, str | None]:
        """What names a row."""
        return self.text, self.tokens, self.method, self.codec


def rows(
    model: Any, tokenizer: Any, path: Path, tokens: int, cells: list[tuple[str, str | None]]
) -> Iterator[Row]:
    """The rows of one book, of contexts in memory (codec None) and in files."""
    book = " ".join(path.read_text(errors="ignore").split())
    document = Document.of(tokenizer, book, tokens, sum(path.stem.encode()))
    full = kvfold.compress(model, tokenizer, document.text, "full")
    judge = Judge.of(model, full.cache, document)
    numbers = sum(each.numel() for state in full.cache.states for each in state.stored().dense())
    contexts: dict[str, kvfold.Context] = {}
    for method, codec in cells:
        if method not in contexts:
            name, _, budget = method.partition("@")
            limit = float(budget) if budget else None
            contexts[method] = kvfold.compress(model, tokenizer, document.text, name, limit)
        context, times = contexts[method], [0.0, 0.0]
        part = context.stats().nbytes / full.stats().nbytes_full
        if codec is not None:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "context.kvfold"
                begun = time.process_time()
                context.save(file, codec=codec)
                times[0] = time.process_time() - begun
                part = file.stat().st_size / (2 * numbers)
                begun = time.process_time()
                context = kvfold.load(file, model, tokenizer)
                times[1] = time.process_time() - begun
        yield Row(
            text=path.stem,
            tokens=full.ids.shape[1],
            method=method,
            codec=codec,
            part=part,
            save_seconds=times[0],
            load_seconds=times[1],
            **judge(model, context.cache, document),
        )


def table(found: list[Row]) -> Iterator[str]:
    """One line for each method and codec: means over texts."""
    for method, codec in dict.fromkeys((row.method, row.codec) for row in found):
        own = [row for row in found if (row.method, row.codec) == (method, codec)]
        kl, part = (statistics.mean(getattr(row, name) for row in own) for name in ("kl", "part"))
        seconds = statistics.mean(row.load_seconds for row in own)
        right, asked = sum(row.right for row in own), sum(row.asked for row in own)
        yield (
            f"{method:12} {codec or 'in memory':70} 1/{1 / part:.1f} KL {kl:.4f} "
            f"right {right}/{asked} load {seconds:.2f} s, n = {len(own)}"
        )


def main(
    model: str,
    out: Path,
    books: list[Path],
    basis: Annotated[Path, typer.Option(help="A file of kvfold fit --codec kvtc.")],
    tokens: Annotated[int, typer.Option(help="Tokens of a document, about.")] = 4000,
    ratios: Annotated[str, typer.Option(help="Of kvtc.")] = "8,12,16,20",
    budget: Annotated[float, typer.Option(help="Of kvzip before kvtc.")] = 0.3,
) -> None:
    """Measures what is missing, and prints means."""
    network, tokenizer = load(model, Loading())
    kvtc = [f"kvtc:file={basis},ratio={ratio}" for ratio in ratios.split(",")]
    evicted = f"kvzip@{budget:g}"
    cells: list[tuple[str, str | None]] = [("kivi:bits=4", None), ("kivi:bits=2", None)]
    cells += [("full", "zstd"), *(("full", codec) for codec in kvtc)]
    cells += [(evicted, None), *((evicted, f"kvtc:file={basis},ratio={r}") for r in (3, 4, 6, 8))]
    records = RecordFile(out, Row)
    known = {(row.text, row.method, row.codec) for row in records.load().records}
    for book in books:
        missing = [cell for cell in cells if (book.stem, *cell) not in known]
        for row in rows(network, tokenizer, book, tokens, missing) if missing else ():
            records.add([row])
            print(row.model_dump_json(), flush=True)
    for line in table(list(records.load().records)):
        print(line)


if __name__ == "__main__":
    typer.run(main)
