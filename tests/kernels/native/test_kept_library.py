# SPDX-License-Identifier: Apache-2.0
"""The file of the compiled library: this user's alone, whole, or not read."""

import os
import stat
from pathlib import Path

import pytest

from kvfold import KvfoldError
from kvfold.kernels.native.library import cache_folder, keep, read_kept

LIBRARY = bytes(range(256)) * 20


@pytest.fixture
def kept(tmp_path):
    path = tmp_path / "kvfold" / "kernels.so"
    keep(path, LIBRARY)
    return path


def test_a_kept_library_is_read_again_and_only_its_owner_can_change_it(tmp_path):
    before = os.umask(0)
    try:
        path = tmp_path / "cache" / "kvfold" / "kernels.so"
        keep(path, LIBRARY)
        keep(path, LIBRARY[::-1])
    finally:
        os.umask(before)
    assert read_kept(path) == LIBRARY[::-1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [each.name for each in path.parent.iterdir()] == ["kernels.so"]


def test_every_damage_is_seen(kept):
    whole = kept.read_bytes()
    for length in (0, 1, 31, 32, 33, len(whole) - 1):
        kept.write_bytes(whole[:length])
        assert read_kept(kept) is None
    for place in range(0, len(whole), 97):
        kept.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert read_kept(kept) is None
    kept.write_bytes(whole + b"more")
    assert read_kept(kept) is None


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_a_file_that_others_can_write_is_not_read(mode, kept):
    kept.chmod(mode)
    assert read_kept(kept) is None
    keep(kept, LIBRARY)
    assert read_kept(kept) == LIBRARY


def test_files_and_folders_of_another_user_are_not_used(kept, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept.parents[1]))
    assert cache_folder() == kept.parent
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:  # root may change all files
        assert read_kept(kept) == LIBRARY
        os.chown(kept, 4321, -1)
        os.chown(kept.parent, 4321, -1)
    assert read_kept(kept) is None
    with pytest.raises(KvfoldError, match=r"belongs to another user \(number \d+\): set XDG"):
        cache_folder()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o703])
def test_a_folder_that_others_can_write_is_not_used(mode, kept, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept.parents[1]))
    kept.parent.chmod(mode)
    with pytest.raises(KvfoldError, match="kvfold can be written to by other users: set XDG"):
        cache_folder()


def test_a_pipe_or_folder_in_its_place_is_not_read_and_stays(tmp_path):
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder):
        assert read_kept(path) is None
        keep(path, LIBRARY)
    assert stat.S_ISFIFO(pipe.stat().st_mode) and folder.is_dir()


@pytest.mark.parametrize("relative", ["", "cache", "./cache", "~/.cache"])
def test_a_relative_cache_is_ignored(relative, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", relative)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/kvfold")


def test_without_a_home_there_is_no_folder_that_all_share(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(KvfoldError, match="there is no home folder to keep them in: set XDG"):
        cache_folder()

    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(KvfoldError, match="there is no home folder to keep them in: set XDG"):
        cache_folder()
