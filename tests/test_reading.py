# SPDX-License-Identifier: Apache-2.0
"""Only regular files are read: opening a pipe would wait, and a device may never end."""

import os
from pathlib import Path

import pytest

from kvfold.reading import opened_regular


def test_a_regular_file_is_read_and_others_are_named(tmp_path):
    file, pipe, link = tmp_path / "file", tmp_path / "pipe", tmp_path / "link"
    file.write_bytes(b"text")
    link.symlink_to(file)
    os.mkfifo(pipe)
    for path in (file, link, str(file)):
        with opened_regular(path) as opened:
            assert opened.read() == b"text"
    held = len(os.listdir("/dev/fd")) if Path("/dev/fd").is_dir() else 0
    for path, what in ((pipe, "a pipe"), (tmp_path, "a folder"), (Path(os.devnull), "a device")):
        with pytest.raises(OSError, match=f"it is {what}"), opened_regular(path):
            pytest.fail("it was opened")
    assert not held or len(os.listdir("/dev/fd")) == held
