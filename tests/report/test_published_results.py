# SPDX-License-Identifier: Apache-2.0
"""The bundled model's published results: records, samples, tables, and what pages say, agree."""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from kvfold.eval.run.cell import FULL
from kvfold.eval.run.cell_result import CellResult
from kvfold.report.board import Board, boards
from kvfold.report.load import load_results
from kvfold.report.summary import rows
from kvfold.report.tables import by_task, markdown

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "bundled"
FOLDERS = (".", "uuids", "streaming", "d2o", "simlayerkv", "dbudgetkv", "pyramidkv")
INTERVAL = re.compile(r"[+−]?\d+\.\d \([+−]?\d+\.\d to [+−]?\d+\.\d\)")

# What the page says of two methods: (folder, one, other, question in view, task or None).
COMPARED = [
    *((".", f"pyramidkv@{b}", f"local_window@{b}", False, None) for b in (0.5, 0.2, 0.1)),
    *((".", f"snapkv@{b}", f"local_window@{b}", False, None) for b in (0.5, 0.2)),
    *((".", f"kvzip@{b}", f"kvzip:level=uniform@{b}", False, None) for b in (0.5, 0.2, 0.05)),
    (".", "kvzip@0.5", "kvzip:level=uniform@0.5", False, "niah_magic"),
    (".", "adakv@0.5", "snapkv@0.5", False, None),
    (".", "pyramidkv + adakv@0.5", "pyramidkv@0.5", False, None),
    (".", "d2o@0.2", "local_window@0.2", False, None),
    *((".", f"h2o + merge@{b}", f"h2o@{b}", False, None) for b in (0.2, 0.1)),
    (".", "h2o + merge@0.2", "h2o@0.2", False, "continuation"),
    ("d2o", "d2o:allocation=uniform@0.5", "d2o@0.5", False, None),
    ("pyramidkv", "pyramidkv@256", "snapkv@256", True, None),
]
BUDGETS = (0.5, 0.2, 0.1, 0.05)
NOT_TOLD_APART = [
    *((".", f"snapkv@{b}", f"local_window@{b}", False, None) for b in (0.1, 0.05)),
    *((".", f"{m}@0.2", "full", True, None) for m in ("snapkv", "pyramidkv", "adakv")),
    (".", "kvzip@0.5", "kvzip@0.2", False, None),
    *((".", f"adakv@{b}", f"snapkv@{b}", True, None) for b in (0.2, 0.1)),
    *((".", f"pyramidkv + adakv@{b}", f"pyramidkv@{b}", True, None) for b in (0.2, 0.1)),
    (".", "d2o@0.5", "local_window@0.5", False, None),
    *(
        (".", f"{m}@{b}", f"random@{b}", False, "continuation")
        for m in ("h2o", "d2o", "roco", "tova")
        for b in BUDGETS
    ),
    ("streaming", "streaming_llm@0.1", "d2o@0.1", False, "perplexity"),
    ("d2o", "d2o:allocation=uniform@0.2", "d2o@0.2", False, None),
    *(
        ("d2o", f"d2o:{v}@{b}", f"d2o@{b}", False, None)
        for v in ("merge=none", "merge=average", "similarity=values")
        for b in (0.5, 0.2)
    ),
    (".", "h2o + merge@0.1", "h2o@0.1", False, "continuation"),
    *(("pyramidkv", f"pyramidkv@{b}", f"snapkv@{b}", True, None) for b in (512, 1024)),
    *(("pyramidkv", f"pyramidkv@{b}", "full", True, None) for b in (128, 256, 512, 1024)),
    *((".", f"streaming_llm@{b}", f"cut@{b}", False, "continuation") for b in BUDGETS),
    (".", "kvzip@0.5", "random@0.5", False, "continuation"),
]
TOLD_APART = [
    *((".", f"{m}@0.5", "local_window@0.5", False, None) for m in ("h2o", "roco", "tova")),
    ("streaming", "streaming_llm@0.1", "h2o@0.1", False, "perplexity"),
]

# Scores that the page tells: by folder and protocol, method and budget.
QUOTED = {
    (
        ".",
        False,
    ): "full kvzip@0.2 kvzip@0.05 kvzip@0.5 pyramidkv@0.2 cut@0.2 local_window@0.2 random@0.2 "
    "h2o@0.5 roco@0.5 tova@0.5 d2o@0.5 local_window@0.5 random@0.5 knorm@0.5",
    (".", True): "full pyramidkv@0.1 snapkv@0.1 adakv@0.1 kvzip@0.2 kvzip@0.1",
    ("streaming", False): "full streaming_llm@0.1 d2o@0.1 h2o@0.1",
    ("d2o", False): "d2o@0.5 d2o:allocation=uniform@0.5 d2o:allocation=exponential@0.5",
    ("simlayerkv", False): "full simlayerkv:window=128 simlayerkv:threshold=0.5,window=128 "
    "simlayerkv:window=128,strategy=random simlayerkv:window=128,strategy=random_bottom "
    "simlayerkv:window=128,strategy=random_top",
    (
        "pyramidkv",
        True,
    ): "full pyramidkv@64 snapkv@64 pyramidkv@128 snapkv@128 pyramidkv@256 snapkv@256",
}


@cache
def paired() -> ModuleType:
    """`docs/generate/paired.py`."""
    spec = importlib.util.spec_from_file_location(
        "paired", ROOT / "docs" / "generate" / "paired.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["paired"] = module
    spec.loader.exec_module(module)
    return module


@cache
def records(folder: str) -> list[CellResult]:
    return load_results([RESULTS / folder / "records.jsonl"])


@cache
def samples(folder: str):
    return paired().load(RESULTS / folder)


def gap(folder: str, one: str, other: str, aware: bool, task: str | None):
    return paired().gap(samples(folder), one, other, aware, task)


def page() -> str:
    """The pages that speak of them, their lines joined."""
    texts = ((RESULTS / name).read_text(encoding="utf-8") for name in ("README.md", "oddities.md"))
    return " ".join(" ".join(texts).split())


def means(board: Board) -> list:
    """Rows of a board's scores and of its perplexities."""
    return board.overall() + rows(board.perplexities)


def table(report: str) -> list[str]:
    """Its rows."""
    return [line for line in report.splitlines() if line.startswith("|")]


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_tables_are_those_of_the_records(folder: str) -> None:
    published = (RESULTS / folder / "report.md").read_text(encoding="utf-8")

    assert table(markdown(boards(records(folder)))) == table(published)


@pytest.mark.whole
def test_tables_by_task_are_those_of_the_records() -> None:
    published = (RESULTS / "tasks.md").read_text(encoding="utf-8")

    assert table(by_task(boards(records(".")))) == table(published)


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_records_are_those_of_the_samples(folder: str) -> None:
    """Each record's difference to the full cache, recomputed from every published answer."""
    compared = 0
    for record in records(folder):
        cell = record.cell
        if cell.method == FULL or record.difference is None:
            continue
        length, data = str(cell.length or ""), ";".join(cell.data)
        unit = paired().Unit(cell.task, length, cell.protocol.question_aware, data)
        name = cell.method if cell.budget is None else f"{cell.method}@{cell.budget}"
        found = paired().gap({unit: samples(folder)[unit]}, name, FULL, unit.aware, cell.task)
        expected = record.difference

        assert found.value == pytest.approx(expected.value, abs=1e-6), cell
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-6)
        compared += 1
    assert compared


def test_one_commit_made_everything_and_the_page_names_it() -> None:
    commits = {
        commit for folder in FOLDERS for record in records(folder) for commit in record.commits
    }

    (commit,) = commits
    assert commit is not None and not commit.endswith("-dirty")
    (named,) = re.findall(r"commit ([0-9a-f]{7,})", page())
    assert commit.startswith(named)


@pytest.mark.slow
def test_every_interval_of_the_page_is_measured() -> None:
    known = {paired().written(gap(*claim)) for claim in COMPARED}
    for folder in FOLDERS:
        for board in boards(records(folder)):
            known |= {paired().written(row.gap) for row in means(board) if row.gap is not None}
    said = INTERVAL.findall(page())

    assert len(said) > 20
    assert not [interval for interval in said if interval not in known]


@pytest.mark.parametrize("where", QUOTED, ids=str)
def test_scores_of_the_page_are_measured(where: tuple[str, bool]) -> None:
    folder, aware = where
    (board,) = (one for one in boards(records(folder)) if one.question_aware == aware)
    scores = {
        row.method if row.budget is None else f"{row.method}@{row.budget}": row.score
        for row in board.overall() or rows(board.perplexities)
    }
    said = re.findall(r"\d+\.\d", page())

    assert not [name for name in QUOTED[where].split() if f"{scores[name].value:.1f}" not in said]


@pytest.mark.slow
@pytest.mark.cases(6)
@pytest.mark.parametrize("claim", NOT_TOLD_APART, ids=str)
def test_what_is_not_told_apart_has_zero_in_its_interval(claim) -> None:
    assert gap(*claim).is_noise


@pytest.mark.parametrize("claim", COMPARED + TOLD_APART, ids=str)
def test_what_is_told_apart_has_not(claim) -> None:
    assert not gap(*claim).is_noise
