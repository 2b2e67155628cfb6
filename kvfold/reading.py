# SPDX-License-Identifier: Apache-2.0
"""Regular files that are read: opening a pipe waits for a writer, and a device may never end."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from kvfold.writing import KINDS


@contextmanager
def opened_regular(path: str | Path) -> Iterator[BufferedReader]:
    """The file at `path`, open for the block; raises OSError for anything but a regular file."""
    without_waiting = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, os.O_RDONLY | without_waiting)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(f"it is {KINDS.get(stat.S_IFMT(mode), 'no file')}")
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


@contextmanager
def stable_path(path: str | Path) -> Iterator[Path]:
    """A path that refers to the file now at `path`, even if that is replaced meanwhile.

    safetensors opens a path twice: it could read the header of one file and tensors of another.
    Raises OSError for anything but a regular file.
    """
    with opened_regular(path) as file:
        held = Path(f"/dev/fd/{file.fileno()}")
        yield held if held.exists() else Path(path)


def read_bytes(path: str | Path) -> bytes:
    """Content of a regular file; raises OSError."""
    with opened_regular(path) as file:
        return file.read()


def read_text(path: str | Path) -> str:
    """UTF-8 text of a regular file, without a byte order mark; raises OSError, UnicodeError."""
    return read_bytes(path).decode("utf-8-sig")
