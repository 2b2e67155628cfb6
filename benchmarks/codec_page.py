# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/python.md on what a codec loses, from the rows of `codec_kl.py`:

    python benchmarks/codec_page.py

Rows are docs/results/codec/rows.jsonl. Texts that lack a cell of another text do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from codec_kl import Row, tables
from made_parts import with_part

from kvfold.evidence.records import RecordFile

DOCS = Path(__file__).parents[1] / "docs"
PAGE, ROWS = DOCS / "python.md", DOCS / "results" / "codec" / "rows.jsonl"
BEGIN = "<!-- made by benchmarks/codec_page.py -->"


def load() -> list[Row]:
    """The rows of texts with all cells."""
    rows = RecordFile(ROWS, Row).load().records
    counts = Counter(row.text for row in rows)
    return [row for row in rows if counts[row.text] == max(counts.values())]


def page(text: str, rows: Sequence[Row]) -> str:
    """The page's `text` with the tables between its marks."""
    return with_part(text, BEGIN, "\n" + "\n\n".join(tables(rows)) + "\n\n")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8"), load()), encoding="utf-8")
