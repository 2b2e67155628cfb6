# SPDX-License-Identifier: Apache-2.0
"""KL to the full cache of quantized ones.

`python -m docs.results.quantized.measure MODEL OUT.jsonl BOOK.txt ...`

The documents, tokens that follow and questions of `docs/results/match/measure.py`; each document
is read once, and its full cache encoded by each method. Bytes are those of a model in bfloat16,
whatever the dtype that runs: raw numbers and KIVI's scales count two bytes. Rows of OUT are not
measured again.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from pydantic import BaseModel, ConfigDict

import kvfold
from docs.results.match.measure import Document, Judge
from kvfold.evidence.records import RecordFile
from kvfold.loading import Loading, load
from kvfold.store.ragged import RaggedStore

METHODS = [
    "kivi:bits=4",
    "turboquant:residual=181",  # the bytes of kivi:bits=4 for 1500 tokens
    "kivi:bits=4,residual=32",
    "turboquant:residual=105",  # the bytes of kivi:bits=4,residual=32 for 1500 tokens
    "turboquant",
    "turboquant:correct=false",
    "turboquant:sinks=0",
    "turboquant_k8v4",
    "turboquant_k3v4",
    "turboquant_3bit",
    "turboquant_3bit:end_layers=0",
    "turboquant:keys=2,values=2,end_layers=0",
    "kivi:bits=2",
]
HALF = 2  # bytes of a bfloat16


class Row(BaseModel):
    """One document and method: means over the tokens that follow, and right answers."""

    model_config = ConfigDict(frozen=True)

    text: str
    tokens: int
    method: str
    kl: float
    agree: float
    right: int
    asked: int
    ratio: float  # of the full cache's bytes

    @property
    def key(self) -> tuple[str, int, str]:
        """The row's name."""
        return self.text, self.tokens, self.method


def half_bytes(cache: kvfold.CompressedCache) -> int:
    """Bytes of keys and values in a bfloat16 model."""
    total = 0
    for state in cache.states:
        store = state.stored()
        if not isinstance(store, RaggedStore):
            total += (store.keys.numel() + store.values.numel()) * HALF
            continue
        for part in (store._keys, store._values):
            total += sum(part.alive) * part.tail.rows.shape[-1] * HALF
            encoded = [] if part.encoded is None else part.encoded.tensors()
            total += sum(
                each.numel() * (HALF if each.is_floating_point() else each.element_size())
                for each in encoded
            )
    return total


@torch.no_grad()
def rows(model: Any, tokenizer: Any, path: Path, tokens: int, methods: list[str]) -> Iterator[Row]:
    """All rows of one book."""
    book = " ".join(path.read_text(errors="ignore").split())
    document = Document.of(tokenizer, book, tokens, sum(path.stem.encode()))
    context = kvfold.compress(model, tokenizer, document.text, "full")
    full = kvfold.CompressedCache(model, "full", tokenizer=tokenizer)
    with full.reading():
        model(context.ids, past_key_values=full, logits_to_keep=1)
        encoded = {method: full.to_budget(None, method) for method in methods}
    judge = Judge.of(model, context.cache, document)
    for method, cache in encoded.items():
        ratio = half_bytes(cache) / half_bytes(full)
        judged = judge(model, cache, document)
        yield Row(text=path.stem, tokens=tokens, method=method, ratio=ratio, **judged)


def table(found: list[Row], methods: list[str]) -> Iterator[str]:
    """One line for each method, over the texts of the first one."""
    base = {row.text: row.kl for row in found if row.method == methods[0]}
    for method in methods:
        own = [row for row in found if row.method == method and row.text in base]
        kl = statistics.mean(row.kl for row in own)
        yield (
            f"{method:40} bytes x{statistics.mean(row.ratio for row in own):.3f}"
            f" KL {kl:.4f} x{kl / statistics.mean(base[row.text] for row in own):.2f}"
            f" lower {sum(row.kl < base[row.text] for row in own)}/{len(own)}"
            f" right {sum(row.right for row in own)}/{sum(row.asked for row in own)}"
        )


def main(
    model_name: Annotated[str, typer.Argument(metavar="MODEL")],
    out: Path,
    books: list[Path],
    method: Annotated[list[str] | None, typer.Option()] = None,
    tokens: int = 1500,
) -> None:
    """Measures what is missing in OUT, and prints the table."""
    torch.set_num_threads(1)
    model, tokenizer = load(model_name, Loading(device="cpu"))
    methods = method or METHODS
    records = RecordFile(out, Row)
    known = {row.key: row for row in records.load().records}
    for path in books:
        missing = [name for name in methods if (path.stem, tokens, name) not in known]
        for row in rows(model, tokenizer, path, tokens, missing) if missing else ():
            records.add([row])
            known[row.key] = row
            typer.echo(f"{row.text:24} {row.method:40} KL {row.kl:.4f}")
    wanted = {path.stem for path in books}
    typer.echo("\n".join(table([row for row in known.values() if row.text in wanted], methods)))


if __name__ == "__main__":
    typer.run(main)
