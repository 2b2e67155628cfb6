# SPDX-License-Identifier: Apache-2.0
"""Records that are read for a report, and records that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfold.errors import KvfoldError
from kvfold.report.board import slugs
from kvfold.report.load import load_results
from tests.helpers.reports import _write, made, three


def test_files_of_different_boards_differ() -> None:
    assert slugs(["A b", "a-b", "模型", "c"]) == ["a-b-1", "a-b-2", "3", "c"]


def test_records_of_several_folders_each_once(tmp_path: Path) -> None:
    one = _write(tmp_path / "one" / "records.jsonl", three())
    _write(tmp_path / "two" / "deep" / "records.jsonl", [made("m", "0.2")])
    assert load_results([tmp_path / "one", one, tmp_path]) == [*three(), made("m", "0.2")]


def test_a_cell_recorded_twice_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "one" / "records.jsonl", [made("m", "0.2")])
    _write(tmp_path / "two" / "records.jsonl", [made(), made("m", "0.2", (1.0, 1.0))])
    with pytest.raises(KvfoldError, match=r"a 1024, m 0\.2: .*line 1 of .*one.*line 2 of .*two"):
        load_results([tmp_path])


@pytest.mark.parametrize("line", ['{"half": ', '{"session": "another"}', "\xff"])
def test_what_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = _write(tmp_path / "records.jsonl", [made()])
    path.write_bytes(path.read_bytes() + line.encode("latin-1") + b"\n")
    with pytest.raises(KvfoldError, match=r"line 2 of .*records\.jsonl is no record"):
        load_results([path])


def test_nothing_to_report_is_said(tmp_path: Path) -> None:
    empty = _write(tmp_path / "records.jsonl", [])
    for given, words in ((empty, "no records"), (tmp_path / "not", "cannot read")):
        with pytest.raises(KvfoldError, match=words):
            load_results([given])
    empty.unlink()
    with pytest.raises(KvfoldError, match=r"no records\.jsonl in"):
        load_results([tmp_path])
