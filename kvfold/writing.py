# SPDX-License-Identifier: Apache-2.0
"""Places that can be written to, and the writer of whole files."""

from __future__ import annotations

import errno
import json
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from safetensors import SafetensorError

from kvfold.errors import KvfoldError

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
# Their files are not stored: a rename would replace a device, or a link to an open pipe.
SYSTEM = (Path("/dev"), Path("/dev/fd"), Path("/proc"), Path("/sys"))


def check_place(path: Path) -> None:
    """Raises KvfoldError if no file can be written at `path`, a folder, or in none; as below."""
    check_replaceable(path)
    place = place_of(path)
    if not place.parent.is_dir():
        raise KvfoldError(f"cannot write {path}: there is no folder {place.parent}")
    check_folder(place.parent)


def place_of(path: Path) -> Path:
    """The path that a file at `path` has: a link stays a link, to what is written."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def check_replaceable(*paths: Path) -> None:
    """Raises KvfoldError if something other than a regular file is at a path to write.

    As a pipe, a device or a folder; a rename would put a file in its place. Also for a name that
    no file can have, and for links that lead to each other.
    """
    for path in paths:
        with _told(path):
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode):
                what = KINDS.get(stat.S_IFMT(mode), "no file")
                raise KvfoldError(f"cannot write {path}: it is {what}, so name another file")
            folder = path.parent.resolve()
            if folder in SYSTEM or not {*SYSTEM[2:]}.isdisjoint(folder.parents):
                raise KvfoldError(f"cannot write {path}: {folder} has no files of its own")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """KvfoldError for a path that no file can have; of other errors writing tells why."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise KvfoldError(f"cannot write {path}: {problem.strerror}") from problem


def has_content(path: Path) -> bool:
    """True for a regular file that is not empty."""
    return os.path.isfile(path) and path.stat().st_size > 0  # Path's raises for a long name


def check_kind(path: Path, mark: str, kind: str) -> None:
    """Raises KvfoldError if a file at `path` has content, and is none of a `kind` of kvfold.

    Files of the kind are safetensors whose metadata has the key `mark`.
    """
    check_replaceable(path)
    with suppress(OSError):  # writing tells why
        if has_content(path) and mark not in _metadata(path):
            raise KvfoldError(f"{path} is not of kvfold, or is no {kind}: name another file")


def _metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, even of one cut off; empty for another file."""
    with path.open("rb") as file:
        size, opening = int.from_bytes(file.read(8), "little"), file.read(1)
        if opening != b"{" or size > path.stat().st_size:
            return {}
        try:
            found = json.loads(opening + file.read(size - 1)).get("__metadata__", {})
        except (ValueError, RecursionError):
            return {}
    return found if isinstance(found, dict) else {}


def check_folder(folder: Path) -> None:
    """Raises KvfoldError if no file can be written into a folder, which may be still to be made.

    A trial file in it, or in the nearest folder above it, is removed again.
    """
    try:
        nearest = folder
        for nearest in (folder, *folder.absolute().parents):
            if nearest.exists():
                break
            if nearest.is_symlink():
                raise KvfoldError(f"cannot write into {folder}: {nearest} is a link to nothing")
        with TemporaryFile(dir=nearest):
            pass
    except NotADirectoryError as problem:
        raise KvfoldError(f"cannot write into {folder}: a file is where it would be") from problem
    except OSError as problem:
        raise KvfoldError(f"cannot write into {folder}: {problem.strerror or problem}") from problem


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it; raises KvfoldError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise KvfoldError(f"cannot write into {folder}: {problem.strerror or problem}") from problem


@contextmanager
def replacing(path: Path, rights: int | None = None) -> Iterator[Path]:
    """A temporary path to write to, which replaces `path` if the block succeeds.

    The file gets the permissions `rights`; None: they stay. Raises KvfoldError if it cannot be
    written.
    """
    check_replaceable(path)
    path = place_of(path)
    temporary = path.with_name(f".kvfold-{uuid.uuid4().hex}.tmp")  # short: the name may be long
    try:
        temporary.touch()
        # safetensors may replace the file by one that only its owner can read.
        usual = (path if path.is_file() else temporary).stat().st_mode
        yield temporary
        temporary.chmod(usual if rights is None else rights)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        check_replaceable(path)  # the writing took time
        os.replace(temporary, path)
    except (OSError, SafetensorError) as problem:
        told = getattr(problem, "strerror", None) or problem  # without the temporary file's name
        raise KvfoldError(f"cannot write {path}: {told}") from problem
    finally:
        # On a read-only disk there is no temporary file, and removing fails, too.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text as it is, as `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")
