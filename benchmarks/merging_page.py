# SPDX-License-Identifier: Apache-2.0
"""The table of docs/results/merging.md, from the records of `merging.py`:

    python benchmarks/merging_page.py

Records are docs/results/merging/rows.jsonl.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from made_parts import with_part
from merging import Record, full_loss, table

from kvfold.evidence.records import RecordFile

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PAGE, ROWS = RESULTS / "merging.md", RESULTS / "merging" / "rows.jsonl"
BEGIN = "<!-- made by benchmarks/merging_page.py -->"


def load() -> list[Record]:
    """The published records."""
    return RecordFile(ROWS, Record).load().records


def page(text: str, records: Sequence[Record]) -> str:
    """The page's `text` with the table between its marks."""
    lines = [f"Loss of the full cache: {full_loss(records):.3f}.", "", *table(records)]
    return with_part(text, BEGIN, "\n" + "\n".join(lines) + "\n\n")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8"), load()), encoding="utf-8")
