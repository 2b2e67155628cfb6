# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/codecs.md: `python benchmarks/codec_page.py`.

The rows of `codec_kl.py` are docs/results/codec/rows.jsonl.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kvfold.jobs.records import RecordFile

ROOT = Path(__file__).parents[1]
PAGE, ROWS = ROOT / "docs" / "codecs.md", ROOT / "docs" / "results" / "codec" / "rows.jsonl"
BEGIN, END = "<!-- made by benchmarks/codec_page.py: {} -->", "<!-- end -->"
BASE = ("kivi:bits=4", None)  # whose KL files are held to
TABLES = ("contexts", "equal KL")


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


def tables(rows: Sequence[Row]) -> list[str]:
    """All tables, in the order of `TABLES`."""
    return ["\n".join(made(rows)) for made in (contexts, equal_kl)]


def page(text: str, rows: Sequence[Row]) -> str:
    """The page's `text` with the tables between its marks."""
    for name, table in zip(TABLES, tables(rows), strict=True):
        begin = BEGIN.format(name)
        before, found, rest = text.partition(begin)
        _, mark, after = rest.partition(END)
        assert found and mark, f"{PAGE} lacks the lines {begin} and {END}"
        text = f"{before}{begin}\n\n{table}\n\n{END}{after}"
    return text


def load() -> list[Row]:
    """All rows."""
    return RecordFile(ROWS, Row).load().records


def main() -> None:
    PAGE.write_text(page(PAGE.read_text("utf-8"), load()), encoding="utf-8")


if __name__ == "__main__":
    main()
