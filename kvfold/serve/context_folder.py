# SPDX-License-Identifier: Apache-2.0
"""Folder of context files: a temporary one, or a named one that outlives the server."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvfold.errors import KvfoldError
from kvfold.serve.request_schemas import CONTEXT_ID

SUFFIX = ".kvfold"
# Temporary files of a save whose process was killed. Younger ones may be another server's save
# in progress; seconds.
UNFINISHED, STALE = re.compile(r"\.kvfold-[0-9a-f]{32}\.tmp"), 3600.0


class ContextFolder:
    """Context files `<id>.kvfold` in `named`, or in a temporary folder if that is None.

    Raises KvfoldError if `named` cannot be created or listed.
    """

    def __init__(self, named: Path | None) -> None:
        self.private = named is None
        if named is None:
            self.path = Path(tempfile.mkdtemp(prefix="kvfold-serve-"))
            return
        self.path = named
        try:
            named.mkdir(mode=0o700, exist_ok=True)
            for path in named.iterdir():
                if UNFINISHED.fullmatch(path.name):
                    _remove_stale(path)
        except OSError as problem:
            raise KvfoldError(f"cannot use {named} as the contexts' folder: {problem}") from problem

    def file(self, name: str) -> Path:
        """The path of context `name`; raises KvfoldError for a name that is no id."""
        if not re.fullmatch(CONTEXT_ID, name):
            raise KvfoldError(f"{name!r} is no id of a context")
        return self.path / f"{name}{SUFFIX}"

    def found(self) -> Iterator[tuple[str, Path]]:
        """Ids and files of the contexts in the folder."""
        for path in sorted(self.path.glob(f"*{SUFFIX}")):
            if re.fullmatch(CONTEXT_ID, path.stem):
                yield path.stem, path

    def unnamed(self) -> Iterator[KvfoldError]:
        """One error for each file whose name is no id."""
        for path in sorted(self.path.glob(f"*{SUFFIX}")):
            if not re.fullmatch(CONTEXT_ID, path.stem):
                yield KvfoldError(f"{path}: rename it, {path.stem!r} is no id ({CONTEXT_ID})")

    def close(self) -> None:
        """Removes a temporary folder."""
        if self.private:
            shutil.rmtree(self.path, ignore_errors=True)


def _remove_stale(path: Path) -> None:
    """Removes an unfinished save that is old enough; in a read-only folder it stays."""
    with suppress(OSError):
        if time.time() - path.lstat().st_mtime > STALE:
            path.unlink()
