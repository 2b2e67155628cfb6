# SPDX-License-Identifier: Apache-2.0
"""The library of kernels in C++: compiled once, and never required."""

import os
import shutil
import subprocess
import time
import warnings
from pathlib import Path

import pytest
import torch

from kvfold.kernels.native import library as native


@pytest.fixture(autouse=True)
def _not_loaded():
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.mark.slow
def test_it_is_compiled_once_and_that_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if native.library() is None:
        pytest.skip("no C++ compiler")
    (said,) = caplog.messages
    assert said.startswith("kvfold compiles its C++ kernels, once")
    (made,) = (tmp_path / "kvfold").iterdir()
    assert made.suffix == ".so"

    def never(*args, **options):
        raise AssertionError("compiled again")

    monkeypatch.setattr(subprocess, "Popen", never)
    native.library.cache_clear()
    assert native.library() is not None
    assert caplog.messages == [said]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    native.library.cache_clear()
    with pytest.raises(AssertionError, match="compiled again"):
        native.library()


def test_without_a_compiler_there_is_none(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.library() is None


def test_a_compiler_that_fails_is_told_of(tmp_path, monkeypatch):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho no such standard >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", f"{broken} -m64")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="read more slowly: no such standard"):
        assert native.library() is None
    assert not (tmp_path / "kvfold").exists()


def compiler(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 3", "ended with status 3 and said nothing"),
        ("kill -9 $$", "ended with status -9 and said nothing"),
        ("sleep 60 & wait", "took more than 0.2 s to compile them"),
        ("exit 0", "kernels-"),  # there is no library
    ],
)
def test_a_compiler_that_says_nothing_or_never_ends_is_told_of(
    script, reason, tmp_path, monkeypatch
):
    monkeypatch.setattr(native, "SECONDS", 0.2)
    monkeypatch.setenv("CXX", compiler(tmp_path / "c++", script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match=f"read more slowly: .*{reason}"):
        assert native.library() is None
    assert not (tmp_path / "kvfold").exists()


def test_what_a_compiler_has_started_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "SECONDS", 0.2)
    script = f"sleep 60 & echo $! > {tmp_path}/child; wait"
    monkeypatch.setenv("CXX", compiler(tmp_path / "c++", script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="took more than"):
        native.library()
    child = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{child}/stat")
    for _ in range(100):  # it is reaped by another process
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.02)
    pytest.fail("it still runs")


def test_what_is_no_library_is_not_kept(tmp_path, monkeypatch):
    script = 'while [ "$1" != -o ]; do shift; done; echo nothing > "$2"'
    monkeypatch.setenv("CXX", compiler(tmp_path / "c++", script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="read more slowly"):
        assert native.library() is None
    assert not (tmp_path / "kvfold").exists()


def test_the_folder_of_others_is_named_and_nothing_in_it_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "kvfold").mkdir()
    (tmp_path / "kvfold").chmod(0o777)
    monkeypatch.setattr(native, "read_kept", lambda path: pytest.fail("it was read"))
    with pytest.warns(UserWarning, match=r"kvfold can be written to by other users: set XDG"):
        assert native.library() is None


def test_a_cut_or_altered_library_is_compiled_again(tmp_path, monkeypatch):
    """Loading it would end the process."""
    if native.library() is None:
        pytest.skip("no C++ compiler")
    name = f"kernels-{native._digest(native._command(['c++']))}.so"
    usual = native.cache_folder() / name
    if "CXX" in os.environ or not usual.exists():
        pytest.skip("the usual library is not kept")
    whole, compiled = usual.read_bytes(), []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = tmp_path / "kvfold" / name
    made.parent.mkdir(mode=0o700)

    def again(command, path):
        compiled.append(path)
        path.write_bytes(whole[:-32])

    monkeypatch.setattr(native, "_compile", again)
    altered = bytearray(whole)
    altered[len(whole) // 3] ^= 0x40
    for damaged in (whole[: len(whole) // 2], bytes(altered), whole[:-1], whole[:20], b""):
        made.write_bytes(damaged)
        native.library.cache_clear()
        assert native.library() is not None
        assert made.read_bytes() == whole
    assert len(compiled) == 5


@pytest.mark.whole
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "kvfold").write_text("a file is in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (native.library() is None) == (shutil.which("c++") is None)


@pytest.mark.parametrize("spelled", ["", 'g++ "'])
def test_a_compiler_that_cannot_be_named_is_no_error(spelled, monkeypatch, tmp_path, recwarn):
    monkeypatch.setenv("CXX", spelled)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library() is None


@pytest.mark.whole
def test_a_damaged_library_is_compiled_again_and_a_kept_one_needs_no_compiler(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if native.library() is None:
        pytest.skip("no C++ compiler")
    (made,) = (tmp_path / "kvfold").iterdir()
    made.unlink()
    made.write_bytes(b"no library")
    native.library.cache_clear()
    assert native.library() is not None
    assert made.stat().st_size > 1000
    monkeypatch.setattr(shutil, "which", lambda name: None)
    native.library.cache_clear()
    assert native.library() is not None


def test_tensors_of_another_layout_are_not_read():
    if native.library() is None:
        pytest.skip("no C++ compiler")
    with pytest.raises(AssertionError):
        native.call("attend_to_packed", torch.zeros(2, 3).T)
