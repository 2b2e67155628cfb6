# SPDX-License-Identifier: Apache-2.0
"""The library of kernels in C++: compiled once, and never required."""

import shutil
import subprocess
import warnings

import pytest
import torch

from kvfold.kernels.native import library as native


@pytest.fixture(autouse=True)
def _not_loaded():
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def test_it_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if native.library() is None:
        pytest.skip("no C++ compiler")
    (made,) = (tmp_path / "kvfold").iterdir()
    assert made.suffix == ".so"

    def never(*args, **options):
        raise AssertionError("compiled again")

    monkeypatch.setattr(subprocess, "run", never)
    native.library.cache_clear()
    assert native.library() is not None
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
