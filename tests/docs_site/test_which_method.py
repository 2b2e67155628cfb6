# SPDX-License-Identifier: Apache-2.0
"""docs/which-method.md: made of the records, and its first methods are the best ones."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from types import ModuleType

import pytest

from docs.generate import which_method
from kvfold.methods.description import shortest, without_files
from kvfold.report.load import load_results
from kvfold.report.style import BASELINES
from tests.helpers.reports import made

NEEDLES = "ruler_niah_single_1", "ruler_niah_single_2"


@pytest.fixture
def which() -> ModuleType:
    return which_method


def page_of(which: ModuleType, results: list, samples: dict | None = None) -> str:
    answers, passages = which.long_page.load_distances(), which.match_page.load()
    return which.page(which.Published(results, samples or {}, answers, passages))


def section(page: str, heading: str) -> str:
    (found,) = re.findall(rf"^## {heading}$(.*?)(?=^## |\Z)", page, re.S | re.M)
    return found


@pytest.mark.whole
def test_the_published_page_is_that_of_the_records(which: ModuleType) -> None:
    results = load_results([which.RESULTS / "records.jsonl"])

    samples = which.paired.load(which.RESULTS)
    assert which.PAGE.read_text(encoding="utf-8") == page_of(which, results, samples)


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
    firsts = re.findall(r"`([^`]+)` at ([\d., and]+)[;.]", text.split("Haystack")[0])
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


def test_the_smallest_caches_are_those_of_methods_that_lose_little(which: ModuleType) -> None:
    """Each method once; one that loses 10 points is not among them, nor are baselines."""
    known = {"task": NEEDLES[0], "haystack": "book.txt", "metric": "string_match_all"}
    near, far = (-1.0, -6.0, 4.0), (-10.0, -15.0, -5.0)
    results = [
        made(score=(100.0, 1.0), **known),
        made("snapkv", "0.2", (99.0, 1.0), near, **known),
        made("snapkv", "0.1", (99.0, 1.0), near, **known),
        made("tova", "0.05", (90.0, 1.0), far, **known),
        made("random", "0.05", (99.0, 1.0), near, **known),
        made("kivi", None, (99.0, 1.0), near, **known, nbytes=150.0),
    ]
    rows = which.smallest(which.boards(results)[0])
    assert [(row.method, row.budget) for row in rows] == [("snapkv", "0.1"), ("kivi", None)]
    page = page_of(which, results)
    assert "fewest bytes: `snapkv`" in page
    shown = [line for line in section(page, "Fewest bytes").splitlines() if line[:1] == "|"][2:]
    assert [line.split(" | ")[0] for line in shown] == ["| snapkv", "| kivi"]


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


def test_a_method_is_told_apart_from_the_first_on_the_samples_of_both(which: ModuleType) -> None:
    """20 of 20 against 0 of the first 20; the first one's other samples do not count."""
    known = {"task": NEEDLES[0], "haystack": "book.txt", "metric": "string_match_all"}
    results = [
        made(score=(100.0, 1.0), **known),
        made("zap:file=a", "0.2", (75.0, 1.0), (-25.0, -30.0, -20.0), **known),
        made("snapkv", "0.2", (0.0, 1.0), (-100.0, -100.0, -90.0), **known),
        made("tova", "0.2", (74.0, 1.0), (-26.0, -30.0, -20.0), **known),
    ]
    first = {index: [(float(index < 20), 1.0)] for index in range(27)}
    unit, longer = (which.paired.Unit(NEEDLES[0], length, False, "") for length in ("1024", "2048"))
    none = {index: [(0.0, 1.0)] for index in range(20)}
    cells = {"zap:file=a@0.2": first, "snapkv@0.2": none}
    samples = {unit: cells, longer: cells | {"snapkv@0.2": first}}

    page = page_of(which, results, samples)
    told = {name: row for row in page.splitlines() for name in ("zap", "snapkv", "tova")
            if row.startswith(f"| 0.2 | {name} |")}  # fmt: skip
    assert "|  |" in told["zap"]
    assert "| −100.0 (" in told["snapkv"]
    assert "| – |" in told["tova"]  # no samples of both


def test_the_second_choice_is_told_where_it_fails(which: ModuleType) -> None:
    known = {"task": "ruler_niah_single_3", "haystack": "book.txt"}
    results = [
        made(score=(75.0, 1.0), **known),
        made("zap:file=a", "0.1", (22.5, 1.0), **known),
        made("zap:file=a", "0.2", (85.0, 1.0), **known),
        made("kvzip", "0.1", (80.0, 1.0), **known),
    ]
    said = "(at 0.1 it finds 22.5 % of UUIDs in a novel, `kvzip` 80 %, the full cache 75 %)"
    assert said in page_of(which, results)
    assert "UUIDs" not in page_of(which, results[:1])


def test_lower_distances_in_fewer_bytes_are_told_on_shared_passages(which: ModuleType) -> None:
    every = which.match_page.load()
    text = section(which.PAGE.read_text(encoding="utf-8"), "At a tenth and below")
    _, shared = text.split("All methods were run on")
    rows = [
        [part.strip(" `") for part in line.split("|")[1:-1]] for line in shared.splitlines()[4:]
    ]
    rows = [row for row in rows if row]
    passages = {row.passage for row in every if row.method == "snapkv"}
    assert passages and {row[0] for row in rows} >= {"0.05", "0.02"}
    for budget, name, kl, *_, size, _ in rows:
        own = [
            row
            for row in every
            if which.match_page.named(row.method) == name
            and row.kept == float(budget)
            and row.passage in passages
        ]
        assert float(kl) == pytest.approx(sum(row.kl for row in own) / len(own), abs=6e-4)
        *_, last = [row for row in rows if row[0] == budget]
        assert float(kl) <= float(last[2]) and float(size) <= float(last[5])
