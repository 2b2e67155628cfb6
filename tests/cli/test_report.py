# SPDX-License-Identifier: Apache-2.0
"""`kvfold report`: page, tables and pictures, and refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvfold.cli import app
from kvfold.eval.run.cell_result import CellResult
from kvfold.report.board import boards
from kvfold.report.tables import markdown
from kvfold.report.write import write
from tests.helpers.commands import refused
from tests.helpers.reports import _write, board, known, made


@pytest.mark.slow
def test_the_command_writes_page_tables_and_pictures(tmp_path: Path) -> None:
    hidden = {"depth": {"0.0": known(50, 1), "100.0": known(90, 1)}}
    results = [
        *board(), made(task="niah", by=hidden),
        made("good $x^$ _", "0.2", (50.0, 1.0), (-40.0, -45.0, -35.0), "niah", by=hidden),
        made("good", None, (8.0, 0.1), task="perplexity", lower_is_better=True),
    ]  # fmt: skip
    _write(tmp_path / "run" / "records.jsonl", results)
    out = tmp_path / "report"
    ran = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    assert {path.name for path in out.iterdir()} == {
        "index.html", "report.md", "tasks.md", "records.csv", "pareto-question-agnostic.png",
        "pareto-question-agnostic.svg", "needles-niah-question-agnostic.png",
    }  # fmt: skip
    assert all(path.stat().st_size > 500 for path in out.iterdir())
    assert "Perplexity of perplexity, lower is better" in (out / "report.md").read_text(
        encoding="utf-8"
    )
    again = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--out", str(out), "--json"])
    said = json.loads(again.stdout)
    assert {Path(path).name for path in said["files"]} == {path.name for path in out.iterdir()}
    assert all(claim["claim"] and claim["evidence"] for claim in said["claims"].values())


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("{}\n")
    ran = CliRunner().invoke(app, ["report", str(path)])
    assert ran.exit_code == 2
    assert f"line 1 of {path}" in ran.stderr


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "results",
    [
        [made()],
        [made("m", "0.2", (50.0, None))],
        [made("m", "0.2", score=None, nbytes=None, kept=None, errors={"broken": 3})],
        [made(task="chat", metric=None, score=None)],
        [made(lower_is_better=True)],
    ],
    ids=["full alone", "one sample", "only errors", "transcript", "perplexity"],
)
def test_little_is_reported_too(tmp_path: Path, results: list[CellResult]) -> None:
    written = write(results, tmp_path)
    assert written.paths[0].exists()
    assert markdown(boards(results)).startswith("# Results")


def test_files_of_others_are_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.md").write_text("mine")
    said = refused(
        "report", str(_write(tmp_path / "run" / "records.jsonl", [made()])), "-o", str(out)
    )
    assert "report.md is there without" in said
    assert (out / "report.md").read_text() == "mine"


@pytest.mark.parametrize("name", ["pareto-mine.png", "needles-mine.png", "report.md"])
def test_pictures_of_no_report_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    _write(tmp_path / "records.jsonl", [made()])
    said = refused("report", str(tmp_path / "records.jsonl"), "--out", str(tmp_path / "out"))
    assert said.endswith(f"{name} is there without a report's index.html: choose another --out")
    assert [each.name for each in (tmp_path / "out").iterdir()] == [name]
