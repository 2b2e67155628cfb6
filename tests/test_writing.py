# SPDX-License-Identifier: Apache-2.0
"""Files are written to regular files only: a pipe or a device stays what it is."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from pydantic import BaseModel

import kvfold
from kvfold import KvfoldError
from kvfold.evidence.records import RecordFile
from kvfold.writing import check_folder, check_place, check_replaceable, replacing, write_text
from tests.helpers.commands import refused
from tests.helpers.contexts import DOCUMENT


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "made"
    os.mkfifo(path)
    return path


def is_pipe(path: Path) -> bool:
    return stat.S_ISFIFO(path.stat().st_mode)


def test_a_pipe_stays_a_pipe(pipe, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(KvfoldError, match=r"cannot write .*: it is a pipe"), replacing(path):
            pytest.fail("the writing began")
        with pytest.raises(KvfoldError, match="it is a pipe"):
            write_text(path, "text")
    assert is_pipe(pipe) and link.is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "made"]


def test_a_target_that_became_a_pipe_meanwhile_stays(tmp_path):
    path = tmp_path / "made"
    with pytest.raises(KvfoldError, match="it is a pipe"), replacing(path) as temporary:
        temporary.write_text("text")
        os.mkfifo(path)
    assert is_pipe(path)


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="no devices")
def test_devices_and_the_files_of_open_streams_are_named():
    with pytest.raises(KvfoldError, match=r"cannot write /dev/null: it is a device"):
        check_replaceable(Path("/dev/null"))
    with pytest.raises(KvfoldError, match="it is a device"):
        check_place(Path("/dev/null"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no folder of open files")
def test_the_name_of_an_open_file_is_no_place(tmp_path):
    with (tmp_path / "open").open("w") as file:
        path = Path(f"/proc/self/fd/{file.fileno()}")
        with pytest.raises(KvfoldError, match="has no files of its own"):
            check_replaceable(path)


def test_a_folder_is_told_apart(tmp_path):
    with pytest.raises(KvfoldError, match="it is a folder"), replacing(tmp_path):
        pytest.fail("the writing began")
    with pytest.raises(KvfoldError, match="there is no folder"):
        check_place(tmp_path / "none" / "file")
    check_place(tmp_path / "file")


@pytest.mark.slow
def test_what_users_name_is_refused_before_the_work(pipe, tmp_path):
    model, tokenizer = kvfold.bundled_model()
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40)
    with pytest.raises(KvfoldError, match="it is a pipe"):
        context.save(pipe)
    with pytest.raises(KvfoldError, match="it is a pipe"):
        RecordFile(pipe, BaseModel).load()  # would wait for a writer
    with pytest.raises(KvfoldError, match="it is a pipe"):
        kvfold.fit_scorer(model, tokenizer, ["text"] * 4, pipe)
    (tmp_path / "text").write_text("word " * 100)
    for command in (
        ["compress", "bundled", str(tmp_path / "text"), "--out", str(pipe)],
        ["fit", "bundled", str(tmp_path / "text"), "--out", str(pipe)],
        ["bench", "bundled", "--out", str(pipe)],
    ):
        assert "it is a pipe" in refused(*command)
    assert is_pipe(pipe)


def test_a_link_stays_one_to_what_is_written(tmp_path):
    link, target = tmp_path / "link", tmp_path / "folder" / "target"
    link.symlink_to(target)
    with pytest.raises(KvfoldError, match=r"cannot write .*link: there is no folder .*folder$"):
        check_place(link)
    target.parent.mkdir()
    for text in ("once", "again"):
        check_place(link)
        write_text(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert [each.name for each in target.parent.iterdir()] == ["target"]


@pytest.mark.slow
def test_links_that_lead_nowhere_and_long_names_are_refused_before_the_work(tmp_path):
    loop, lost, long = tmp_path / "loop", tmp_path / "lost", tmp_path / ("a" * 256)
    loop.symlink_to(loop)
    lost.symlink_to(tmp_path / "none")
    for path, told in ((loop, os.strerror(errno.ELOOP)), (long, os.strerror(errno.ENAMETOOLONG))):
        with pytest.raises(KvfoldError, match=f"cannot write .*: {told}"):
            check_place(path)
    for folder in (loop, lost, lost / "deep"):
        with pytest.raises(KvfoldError, match="is a link to nothing"):
            check_folder(folder)
    (tmp_path / "text").write_text("word " * 100)
    (tmp_path / "more").write_text("word " * 100)
    texts = str(tmp_path / "text"), str(tmp_path / "more")
    for command in (
        ["compress", "no/model", texts[0], "--out", str(long)],
        ["compress", "no/model", texts[0], "--budgets", "0.5,0.2", "--out", str(long)[:-1]],
        ["fit", "no/model", texts[0], "--words", "50", "--out", str(long)],
        ["demo", "no/model", "--page", f"{long}.html"],
    ):
        assert refused(*command).endswith(os.strerror(errno.ENAMETOOLONG))
    assert "there is no such folder" in refused("compress", "no/model", *texts, "--out", str(long))
    for command in (["eval", "no/model", "--tasks", "niah_magic"], ["inspect", "no/model"]):
        assert "is a link to nothing" in refused(*command, "--out", str(lost))
    model, tokenizer = kvfold.bundled_model()
    with pytest.raises(KvfoldError, match=os.strerror(errno.ENAMETOOLONG)):
        kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40).save(long)
    partial = tmp_path / ("a" * 250)  # its stopped fit has a longer name
    with pytest.raises(KvfoldError, match=os.strerror(errno.ENAMETOOLONG)):
        kvfold.fit_scorer(model, tokenizer, ["text and more " * 60] * 4, partial)


def test_no_option_for_a_place_is_empty():
    for option in (["--out", ""], ["-o", ""], ["--out="]):
        said = refused("compress", "no/model", "text", *option)
        assert said == f"error: {option[0].rstrip('=')} is empty: give it a name"
    assert "--page is empty" in refused("demo", "--page", "")
