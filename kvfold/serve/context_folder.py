# SPDX-License-Identifier: Apache-2.0
"""The folder that contexts are moved to: private, or one that outlives the server."""

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
# What a save leaves behind whose process was killed; other servers' saves are younger.
UNFINISHED, STALE = re.compile(r"\..+\.kvfold\.[0-9a-f]{32}\.tmp"), 3600.0


class Folder:
    """Files of contexts by their ids. Raises KvfoldError where `named` cannot be used."""

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
        """Where the context `name` is written; a name that is no id is refused."""
        if not re.fullmatch(CONTEXT_ID, name):
            raise KvfoldError(f"{name!r} is no id of a context")
        return self.path / f"{name}{SUFFIX}"

    def found(self) -> Iterator[tuple[str, Path]]:
        """Ids and files of the contexts that are there."""
        for path in sorted(self.path.glob(f"*{SUFFIX}")):
            if re.fullmatch(CONTEXT_ID, path.stem):
                yield path.stem, path

    def close(self) -> None:
        """Removes a private folder."""
        if self.private:
            shutil.rmtree(self.path, ignore_errors=True)


def _remove_stale(path: Path) -> None:
    """Removes what a killed save left; in a folder that is only read it may stay."""
    with suppress(OSError):
        if time.time() - path.lstat().st_mtime > STALE:
            path.unlink()
