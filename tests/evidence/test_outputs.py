# SPDX-License-Identifier: Apache-2.0
"""Paths to write and to read, under other names of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfold.errors import KvfoldError
from kvfold.evidence.outputs import check_apart


def test_a_read_path_is_not_written_under_any_name(tmp_path: Path) -> None:
    book, link, folder = tmp_path / "book.txt", tmp_path / "link.txt", tmp_path / "folder"
    book.write_text("once")
    link.symlink_to(book)
    folder.mkdir()
    for made, read in (
        (book, book),
        (link, book),
        (book, link),
        (folder / ".." / "book.txt", str(book)),
        (folder, f"{folder}/."),
    ):
        with pytest.raises(KvfoldError, match=r"would be overwritten: choose another --page$"):
            check_apart([tmp_path / "new", made], [None, read], remedy="choose another --page")


def test_other_paths_are_written(tmp_path: Path) -> None:
    copy, book = tmp_path / "copy.txt", tmp_path / "book.txt"
    for path in (copy, book):
        path.write_text("once")
    check_apart([copy, tmp_path / "new.txt"], [None, "-", book, tmp_path / "lost.txt"])
    check_apart([Path("-")], ["-"])
