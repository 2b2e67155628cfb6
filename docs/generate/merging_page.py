# SPDX-License-Identifier: Apache-2.0
"""The table of docs/results/merging.md: `python -m docs.generate.merging_page`.

Records are those of docs/results/merging/measure.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from docs.generate.made import RESULTS, write_part
from docs.results.merging.measure import Record, full_loss, table
from kvfold.evidence.records import RecordFile

PAGE, ROWS = RESULTS / "merging.md", RESULTS / "merging" / "rows.jsonl"
BEGIN = "<!-- made by docs/generate/merging_page.py -->"


def load() -> list[Record]:
    """The published records."""
    return RecordFile(ROWS, Record).load().records


def part(records: Sequence[Record]) -> str:
    """The full cache's loss, and the table."""
    return "\n".join([f"Loss of the full cache: {full_loss(records):.3f}.", "", *table(records)])


if __name__ == "__main__":
    write_part(PAGE, BEGIN, part(load()))
