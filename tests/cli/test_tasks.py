# SPDX-License-Identifier: Apache-2.0
"""`kvfold tasks`: every name, and the data that each wants."""

from __future__ import annotations

from pathlib import Path

from kvfold.eval.tasks import families, tasks
from tests.helpers.commands import kvfold_command, refused, run_json


def test_tasks_lists_every_name_and_the_data_each_wants() -> None:
    listed = kvfold_command("tasks")
    assert listed.exit_code == 0, listed.output
    words = listed.output.replace(",", " ").split()
    assert set(words) >= set(tasks()) | set(families())
    found = {task["name"]: task for task in run_json("tasks")}
    assert set(found) == set(tasks())
    assert found["longbench_qasper"]["data"] == "qasper.jsonl"
    assert found["longbench_qasper"]["hub"] == "THUDM/LongBench"
    assert found["ruler_niah_single_1"]["data"] is None
    shown = kvfold_command("tasks", "loogle").output
    assert "longdep_summarization.jsonl" in shown.replace("\n", "").replace(" ", "")
    assert "did you mean 'ruler_vt'" in refused("tasks", "vt")


def test_the_pages_of_tasks_name_every_file_of_data() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = "".join(each.read_text("utf-8") for each in docs.glob("tasks*.md"))
    for task in run_json("tasks"):
        assert f"`{task['name']}`" in page
        assert task["data"] is None or f"`{task['data']}`" in page
