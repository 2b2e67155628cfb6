# SPDX-License-Identifier: Apache-2.0
"""Files and folders that a command writes, apart from those that it reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvfold.errors import KvfoldError
from kvfold.writing import check_replaceable

BEGINNING = 1 << 20  # bytes in which a file of kvfold says so


def check_apart(
    made: Iterable[Path], read: Iterable[str | Path | None], *, remedy: str = "choose another --out"
) -> None:
    """Raises KvfoldError if a path to write is one of those to read, under any name.

    `read` may name standard input, "-", or nothing, None. `remedy` ends the message.
    """
    sources = [Path(source) for source in read if source is not None and str(source) != "-"]
    for path in made:
        if any(_same(path, source) for source in sources):
            raise KvfoldError(f"{path} is read, and would be overwritten: {remedy}")


def check_own(*paths: Path) -> None:
    """Raises KvfoldError for a file that kvfold has not made, and would write over.

    Also for what is no regular file.
    """
    check_replaceable(*paths)
    for path in paths:
        if path.is_file() and b"kvfold" not in _beginning(path):
            raise KvfoldError(f"{path} is not of kvfold: choose another --out")


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(BEGINNING)


def _same(one: Path, other: Path) -> bool:
    """True if both paths lead to one file or folder that exists."""
    try:
        return one.samefile(other)
    except OSError:
        return False
