# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/results/codec/README.md: `python -m docs.generate.codec_page`.

Rows are those of docs/results/codec/measure.py. Texts that lack a cell of another text do not
count.
"""

from __future__ import annotations

from collections import Counter

from docs.generate.made import RESULTS, write_part
from docs.results.codec.measure import Row, tables
from kvfold.evidence.records import RecordFile

PAGE, ROWS = RESULTS / "codec" / "README.md", RESULTS / "codec" / "rows.jsonl"
BEGIN = "<!-- made by docs/generate/codec_page.py -->"


def load() -> list[Row]:
    """The rows of texts with all cells."""
    rows = RecordFile(ROWS, Row).load().records
    counts = Counter(row.text for row in rows)
    return [row for row in rows if counts[row.text] == max(counts.values())]


if __name__ == "__main__":
    write_part(PAGE, BEGIN, tables(load()))
