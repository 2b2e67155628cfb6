# SPDX-License-Identifier: Apache-2.0
"""Records of a benchmark: torn lines, other machines, other files."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfold.bench.models import BenchModel
from kvfold.bench.participants import AGAIN, ParticipantLabel
from kvfold.bench.record import RoundRecord, check_setup, check_shape
from kvfold.errors import KvfoldError
from kvfold.evidence.records import RecordFile
from tests.helpers.benchmarks import SETUP, cell_of, record

NOISE = ParticipantLabel("baseline", AGAIN)
SNAPKV = ParticipantLabel("kvfold", "snapkv", "0.5")


def test_a_torn_last_line_is_dropped_and_nothing_else(tmp_path: Path, subject: BenchModel) -> None:
    path, cell = tmp_path / "r.jsonl", cell_of(subject)
    store = RecordFile(path, RoundRecord)
    store.add([record(NOISE, cell=cell, subject=subject)])
    whole = path.read_bytes()
    for length in (1, 5, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole + whole[:length])
        loaded = store.load()
        assert (len(loaded.records), loaded.torn) == (1, length)
        assert path.read_bytes() == whole
    store.add([record(SNAPKV, cell=cell, subject=subject)])
    assert [r.label for r in store.load().records] == [NOISE, SNAPKV]
    assert path.read_bytes().startswith(whole)


def test_a_whole_last_line_without_its_break_stays(tmp_path: Path, subject: BenchModel) -> None:
    path, cell = tmp_path / "r.jsonl", cell_of(subject)
    store = RecordFile(path, RoundRecord)
    store.add([record(each, cell=cell, subject=subject) for each in (NOISE, SNAPKV)])
    whole = path.read_bytes()
    path.write_bytes(whole.rstrip(b"\n"))
    loaded = store.load()
    assert ([r.label for r in loaded.records], loaded.torn) == ([NOISE, SNAPKV], 0)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "text", ["notes", "notes\n", '{"a": 1}\n', '{"a"', '{"session": 1, "b": 2}', "{", '{"s']
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(KvfoldError, match=r"line 1 of .* is no record"):
        RecordFile(path, RoundRecord).load()
    assert path.read_text() == text


def test_records_of_another_machine_are_refused(subject: BenchModel, tmp_path: Path) -> None:
    versions = {"kvfold": "0", "torch": "1"}
    other = SETUP.model_copy(update={"threads": 2, "versions": versions})
    theirs = record(SNAPKV, cell=cell_of(subject), setup=other, subject=subject)
    check_setup([theirs], {"kvfold": other}, tmp_path)
    with pytest.raises(KvfoldError) as refusal:
        check_setup([theirs], {"kvfold": SETUP}, tmp_path)
    assert "threads is 1, there 2" in str(refusal.value)
    assert "torch is 2, there 1" in str(refusal.value)


def test_records_of_another_model_of_the_name_are_refused(
    subject: BenchModel, tmp_path: Path
) -> None:
    cell = cell_of(subject)
    ours = record(SNAPKV, cell=cell, subject=subject)
    larger = ours.model_copy(update={"shape": ours.shape.model_copy(update={"layers": 99})})
    check_shape([ours], [cell], subject.shape, tmp_path)
    check_shape([larger], [], subject.shape, tmp_path)
    with pytest.raises(KvfoldError, match="recorded of another model of the name"):
        check_shape([ours, larger], [cell], subject.shape, tmp_path)
