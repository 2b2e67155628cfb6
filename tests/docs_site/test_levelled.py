# SPDX-License-Identifier: Apache-2.0
"""The table of docs/vllm-uneven.md is that of the published rows."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from docs.results.levelled.measure import METHODS, RULES, Row, table
from kvfold.evidence.records import RecordFile

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return RecordFile(DOCS / "results" / "levelled" / "rows.jsonl", Row).load().records


def test_the_page_shows_the_means_of_the_rows(rows: list[Row]) -> None:
    page = (DOCS / "vllm-uneven.md").read_text(encoding="utf-8")
    assert "\n".join(table(rows)) in page
    mass = [row.to_own for row in rows if (row.method, row.rule) == ("kvzip", "mass")]
    assert f"{sum(mass) / len(mass):.3f} ({min(mass):.3f} to {max(mass):.3f})" in page


def test_every_text_has_every_method_and_rule(rows: list[Row]) -> None:
    texts = {row.text for row in rows}
    found = {(row.text, row.method, row.rule) for row in rows}
    assert len(texts) >= 6 and found == set(product(texts, METHODS, RULES))
    assert all(row.to_full < 1e-3 for row in rows if row.rule == "union" and row.kept == row.tokens)
