# SPDX-License-Identifier: Apache-2.0
"""docs/answering-long.md: its table and its picture are those of the records."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from kvfold.bench.models import BenchModel

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages() -> Iterator[ModuleType]:
    """`benchmarks/long_page.py`."""
    path = list(sys.path)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield import_module("long_page")
    sys.path[:] = path
    for name in ("long_page", "long_run"):
        sys.modules.pop(name, None)


def test_the_published_table_and_picture_are_those_of_the_records(pages, tmp_path):
    text = pages.PAGE.read_text(encoding="utf-8")
    assert pages.page(text, pages.load("runs.jsonl")) == text
    pages.draw(pages.load("entries.jsonl"), tmp_path / pages.PICTURE)
    published = (pages.OUT / pages.PICTURE).read_bytes()
    assert (tmp_path / pages.PICTURE).read_bytes() == published


def test_bytes_are_counted_where_they_are_most(pages):
    """A round after every 10 tokens; the marks themselves come right after one."""
    subject = BenchModel.of("tiny", "float32", 0)
    runs = [
        sys.modules["long_run"].long_run(subject, method, budget, 20, 60, 20)
        for method, budget in (("knorm + every:interval=10", 15), ("knorm", 15), ("full", None))
    ]
    in_rounds, appending, full = runs
    assert [run.flat for run in runs] == [True, False, False]
    assert [mark.entries for mark in in_rounds.marks] == [15, 15, 15]
    assert [mark.entries for mark in appending.marks] == [35, 55, 75]
    assert [mark.entries for mark in full.marks] == [40, 60, 80]
    entry = full.marks[-1].most_bytes / 80
    assert 24 < in_rounds.marks[-1].most_bytes / entry < 30
    assert in_rounds.late_over_early is None


def test_a_long_enough_answer_is_set_against_a_young_one(pages):
    subject = BenchModel.of("tiny", "float32", 0)
    made = sys.modules["long_run"].long_run(subject, "knorm + every:interval=2", 15, 20, 60, 20)
    assert made.late_ms is not None and made.late_ms > 0
    assert made.late_over_early is not None and 0.2 < made.late_over_early < 5
