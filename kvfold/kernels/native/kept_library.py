# SPDX-License-Identifier: Apache-2.0
"""The compiled library's file in the user's cache folder, which ends with a digest of the library.

A damaged library would end the process that loads it, and one that another user has put there would
run as this user.
"""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import suppress
from pathlib import Path

from kvfold.errors import KvfoldError
from kvfold.reading import opened_regular
from kvfold.writing import replacing

DIGEST = hashlib.sha256().digest_size
REMEDY = "set XDG_CACHE_HOME to a folder of your own"


def cache_folder() -> Path:
    """kvfold's folder in this user's cache, which may be still to be made.

    Raises KvfoldError if there is no place for it, or if other users can change what is in it.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():  # a relative one is to be ignored
        caches = _home() / ".cache"
    folder = caches / "kvfold"
    with suppress(OSError):  # it is not there, or not for this user
        wrong = _others(folder.stat())
        if wrong is not None:
            raise KvfoldError(f"the folder {folder} {wrong}: {REMEDY}")
    return folder


def _home() -> Path:
    try:
        home = Path.home()
    except RuntimeError:  # the user has no entry and the environment no name
        home = Path()
    if not home.is_absolute():
        raise KvfoldError(f"there is no home folder to keep them in: {REMEDY}")
    return home


def _others(state: os.stat_result) -> str | None:
    """What other users than this one and root can do with a file, in words; None: nothing."""
    if sys.platform == "win32":
        return None
    if state.st_uid not in (0, os.geteuid()):
        return f"belongs to another user (number {state.st_uid})"
    return "can be written to by other users" if state.st_mode & 0o022 else None


def read_kept(path: Path) -> bytes | None:
    """The library in a file; None if there is none, it is damaged, or others can change it."""
    try:
        with opened_regular(path) as file:
            if _others(os.fstat(file.fileno())) is not None:
                return None
            whole = file.read()
    except OSError:
        return None
    library, digest = whole[:-DIGEST], whole[-DIGEST:]
    return library if hashlib.sha256(library).digest() == digest else None


def keep(path: Path, library: bytes) -> None:
    """Puts a library into a file, where that can be written; other processes may do the same."""
    with suppress(OSError, KvfoldError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path, rights=0o644) as temporary:
            temporary.write_bytes(library + hashlib.sha256(library).digest())
