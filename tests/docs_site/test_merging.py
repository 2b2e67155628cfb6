# SPDX-License-Identifier: Apache-2.0
"""Merging of evicted entries: the page's table follows from the rows, and is that by hand."""

from __future__ import annotations

from docs.generate import merging_page as pages
from docs.generate.made import with_part


def test_the_page_is_made_of_the_rows():
    text = pages.PAGE.read_text(encoding="utf-8")
    assert text == with_part(text, pages.BEGIN, pages.part(pages.load()))


def test_all_passages_have_all_methods():
    rows = pages.load()
    cells = {(row.method, row.kept) for row in rows}
    passages = {(row.book, row.passage) for row in rows}
    assert len(rows) == len(cells) * len(passages) == 19 * 60


def test_the_interval_is_over_novels():
    """Three novels of two passages: means 0.1, 0.2 and 0.3 above, t of two degrees 4.303."""
    above = {"a": (0.05, 0.15), "b": (0.1, 0.3), "c": (0.7, -0.1)}
    rows = [
        pages.Record(book=book, passage=i, method=method, kept=0.1, one_by_one=False, loss=loss)
        for book, changes in above.items()
        for i, change in enumerate(changes)
        for method, loss in (("knorm", 2.0), ("knorm + merge", 2.0 + change))
    ]
    found = pages.table(rows)[2]
    half = 4.303 * 0.1 / 3**0.5
    expected = f"{0.2 - half:+.3f} to {0.2 + half:+.3f}".replace("-", "−")
    assert (
        found == f"| 0.1 | knorm + merge | 2.200 | knorm | 2.000 | +0.200 ({expected}) | 5 of 6 |"
    )
