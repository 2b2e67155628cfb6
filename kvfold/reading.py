# SPDX-License-Identifier: Apache-2.0
"""Regular files that are read: opening a pipe waits for a writer, and a device may never end."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kvfold.writing import KINDS


@contextmanager
def opened_regular(path: str | Path) -> Iterator[BinaryIO]:
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
