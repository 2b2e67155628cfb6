# SPDX-License-Identifier: Apache-2.0
"""Where rows come from: folders, the hub, and bad rows that are named by file and line."""

import json
import sys
import types
from pathlib import Path

import pytest

from kvfold.errors import KvfoldError
from kvfold.eval.tasks import SampleRequest, TaskSample, UnreadableSample, source
from tests.helpers.tasks import ALL, count, longbench_row, read

GENERATED = [name for name, task in ALL.items() if task.generated]


def test_bad_rows_are_named_by_file_and_line_and_the_others_are_read(tmp_path):
    good = longbench_row("qasper")
    rows = [
        good,
        '{"context": ',
        "",
        good | {"context": ""},
        good | {"answers": "Bob"},
        good | {"answers": []},
        "[1]",
        {"dataset": "qasper"},
        good,
    ]
    found = read("longbench_qasper", rows, tmp_path)
    assert [type(one) for one in found] == [TaskSample, *[UnreadableSample] * 6, TaskSample]
    assert [record.index for record in found if isinstance(record, TaskSample)] == [0, 7]
    bad = found[1:-1]
    assert [one.where.rsplit(":", 1)[1] for one in bad] == ["2", "4", "5", "6", "7", "8"]
    assert all(one.where.startswith(str(tmp_path / "rows.jsonl")) for one in bad)
    for one, word in zip(
        bad, ("JSON", "'context'", "'answers'", "'answers'", "list", "'context'"), strict=True
    ):
        assert word in one.why


@pytest.mark.parametrize(
    "error",
    [TypeError("not iterable"), KeyError("Q"), AttributeError("x"), OverflowError("infinity"),
     MemoryError(), RecursionError("too deep")],
)  # fmt: skip
def test_a_row_that_no_conversion_expects_is_named_and_the_others_are_read(error, tmp_path):
    class Row(source.DatasetRow):
        text: str

    def convert(row):
        if row.text == "odd":
            raise error
        return TaskSample("own", 0, row.text, ())

    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "odd"}\n{"text": "good"}\n', encoding="utf-8")
    request = SampleRequest(data=str(file))
    bad, good = source.samples(request, Row, convert, file="rows")
    assert bad == UnreadableSample(f"{file}:1", f"its values cannot be read: {error!r}")
    assert (good.index, good.context) == (1, "good")


def test_a_byte_order_mark_is_no_part_of_rows_and_texts(tmp_path):
    path = tmp_path / "qasper.jsonl"
    path.write_text("\n" + json.dumps(longbench_row("qasper")) + "\n", encoding="utf-8-sig")
    (record,) = ALL["longbench_qasper"].samples(SampleRequest(data=str(path)))
    assert isinstance(record, TaskSample)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("It rained.", encoding="utf-8-sig")
    assert source.text(tmp_path) == "It rained.\nIt rained."


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("absent")])
def test_what_is_named_as_a_text_and_is_none_is_refused(make, tmp_path):
    (tmp_path / "a.txt").write_text("One. Two.")
    make(tmp_path / "b.txt")
    with pytest.raises(KvfoldError, match=r"there is no text at .*b\.txt$"):
        source.text(tmp_path)


def test_a_folder_holds_a_file_per_task(tmp_path):
    (tmp_path / "qasper.jsonl").write_text(json.dumps(longbench_row("qasper")), encoding="utf-8")
    (record,) = ALL["longbench_qasper"].samples(SampleRequest(data=str(tmp_path)))
    assert record.task == "longbench_qasper"
    with pytest.raises(KvfoldError, match=r"no file .*trec\.jsonl"):
        list(ALL["longbench_trec"].samples(SampleRequest(data=str(tmp_path))))


@pytest.mark.parametrize("name", sorted(set(ALL) - set(GENERATED)))
def test_a_task_that_needs_data_says_so(name):
    with pytest.raises(KvfoldError, match="needs data"):
        list(ALL[name].samples(SampleRequest(count=count)))


def test_the_hub_is_read_through_datasets_where_it_is_installed(monkeypatch):
    task, request = ALL["longbench_qasper"], SampleRequest(data="THUDM/LongBench", samples=2)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(KvfoldError, match="pip install datasets"):
        list(task.samples(request))

    asked = []

    def load(name, subset=None):
        asked.append((name, subset))
        if subset == "passkey":
            raise ValueError("BuilderConfig 'passkey' not found")
        row = {"context": "text", "input": "What?", "answer": ["1"]}
        return {"train": [], "test": [longbench_row("qasper")] * 3, "passkey": [row]}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    assert len(list(task.samples(request))) == 2
    assert asked == [("THUDM/LongBench", "qasper")]
    (record,) = ALL["infinitebench_passkey"].samples(SampleRequest(data="a/b"))
    assert record.questions[0].answers == ("1",)

    def offline(name, subset=None):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=offline))
    with pytest.raises(KvfoldError, match="cannot be read: no route"):
        list(task.samples(request))
