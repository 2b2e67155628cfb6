# SPDX-License-Identifier: Apache-2.0
"""Files and folders that a command writes, apart from those that it reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvfold.errors import KvfoldError
from kvfold.writing import check_replaceable

BEGINNING = 1 << 20  # bytes in which a file of kvfold says so
REPLACE = "replace it with --force, or choose another --out"
# A page may tell of kvfold and be the user's own.
OF_PAGES = b'<meta name="generator" content="kvfold">'


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


def check_own(*paths: Path, option: str = "--out") -> None:
    """Raises KvfoldError for a file that kvfold has not made, and would write over.

    Also for what is no regular file. An empty file may be written over.
    """
    check_replaceable(*paths)
    for path in paths:
        said = OF_PAGES if path.suffix.lower() in (".html", ".htm") else b"kvfold"
        beginning = _beginning(path) if path.is_file() else b""
        if beginning and said not in beginning:
            raise KvfoldError(f"{path} is not of kvfold: choose another {option}")


def check_made(path: Path, what: str, there: object, here: object) -> None:
    """Raises KvfoldError if the file at `path` was made with another value of `what` than here."""
    if there != here:
        raise KvfoldError(
            f"{path} is there already, made with {what} {there} instead of {here}: {REPLACE}"
        )


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(BEGINNING)


def _same(one: Path, other: Path) -> bool:
    """True if both paths lead to one file or folder that exists."""
    try:
        return one.samefile(other)
    except OSError:
        return False
