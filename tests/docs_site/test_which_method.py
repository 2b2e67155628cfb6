# SPDX-License-Identifier: Apache-2.0
"""docs/which-method.md: made of the records, and its first methods are the best ones."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from types import ModuleType

import pytest

from kvfold.methods.description import shortest, without_files
from kvfold.report.load import load_results
from kvfold.report.style import BASELINES
from tests.helpers.reports import made
from tests.helpers.scripts import BENCHMARKS, scripts_of

NEEDLES = "ruler_niah_single_1", "ruler_niah_single_2"


@pytest.fixture(scope="module")
def which() -> Iterator[ModuleType]:
    """`benchmarks/which_method.py`."""
    with scripts_of(BENCHMARKS) as script:
        yield script("which_method")


def page_of(which: ModuleType, results: list) -> str:
    return which.page(results, which.long_page.load_distances(), which.match_page.load())


def section(page: str, heading: str) -> str:
    (found,) = re.findall(rf"^## {heading}$(.*?)(?=^## |\Z)", page, re.S | re.M)
    return found


def test_the_published_page_is_that_of_the_records(which: ModuleType) -> None:
    results = load_results([which.RESULTS / "records.jsonl"])

    assert which.PAGE.read_text(encoding="utf-8") == page_of(which, results)


def test_the_first_of_each_budget_has_the_best_mean_of_the_raw_records(which: ModuleType) -> None:
    scores: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in (which.RESULTS / "records.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        cell = record["cell"]
        known = cell["task"] in NEEDLES and cell["length"] == 1024 and cell["budget"]
        if known and not cell["protocol"]["question_aware"] and cell["method"] not in BASELINES:
            name = shortest(without_files(cell["method"]))
            scores[cell["budget"], name].append(record["score"]["value"])
    means = {of: sum(two) / 2 for of, two in scores.items() if len(two) == len(NEEDLES)}

    text = section(which.PAGE.read_text(encoding="utf-8"), "Before the question is known")
    firsts = re.findall(r"`([^`]+)` at ([\d., and]+)[;.]", text.split("Samples")[0])
    found = {
        budget: name for name, budgets in firsts for budget in re.findall(r"\d+\.\d+", budgets)
    }
    assert set(found) == {budget for budget, _ in means}
    for budget, name in found.items():
        best = max(mean for (other, _), mean in means.items() if other == budget)
        assert means[budget, name] == pytest.approx(best)


def test_equal_scores_are_ordered_by_operations_then_bytes(which: ModuleType) -> None:
    def row(method: str, score: float, operations: float | None, nbytes: float):
        kept = made(method, "0.2", (score, 1.0), task=NEEDLES[0])
        (one,) = which.boards([kept])[0].overall()
        changes = {"prefill_operations": operations, "bytes_ratio": nbytes}
        return one.__class__(**{**vars(one), **changes})

    rows = [
        row("unknown", 90.0, None, 0.1),
        row("dear", 90.0, 2.1, 0.1),
        row("large", 90.0, 1.001, 0.3),
        row("small", 90.0, 1.002, 0.2),
        row("worse", 80.0, 0.9, 0.1),
    ]
    names = [one.method for one in which.ranked(rows)]
    assert names == ["small", "large", "dear", "unknown", "worse"]


def test_methods_that_repeat_the_prompt_are_in_no_table_without_extra_prefill(
    which: ModuleType,
) -> None:
    page = which.PAGE.read_text(encoding="utf-8")

    rows = [line for line in section(page, "No extra prefill").splitlines() if line[:1] == "|"]
    assert "| kvzip " in page
    assert rows and not [line for line in rows if "kvzip" in line]


def test_a_part_of_the_records_makes_a_page(which: ModuleType) -> None:
    known = {"task": NEEDLES[0], "haystack": "book.txt", "metric": "string_match_all"}
    results = [
        made(score=(98.0, 1.0), **known),
        made("kvzip", "0.2", (91.0, 1.0), (-7.0, -9.0, -5.0), **known),
        made("kivi", None, (60.0, 1.0), (-38.0, -40.0, -30.0), **known),
    ]
    page = page_of(which, results)

    assert "First of each budget: `kvzip` at 0.2." in page
    assert "With the question in view" not in page
    assert "| kivi" not in page  # it loses more than the page takes
