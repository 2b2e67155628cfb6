# SPDX-License-Identifier: Apache-2.0
"""Digests of the files of methods: fitted scorers, filters, heads, sizes, and your own code."""

from __future__ import annotations

import hashlib
import os
import sys
from functools import lru_cache

from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import TRUNCATED, EvalCell
from kvfold.fitted.fits import path_of
from kvfold.fitted.numbers import NO_FILE, FittedFile
from kvfold.fitted.sources import Sources
from kvfold.methods.base import Method, Stages, origins, parse
from kvfold.methods.description import files_of
from kvfold.reading import opened_regular


def digests(method: str) -> tuple[str, ...]:
    """Digest of each file that the method reads, the bundled ones among them, or is written in.

    The code of kvfold's own methods is not among them.

    Raises KvfoldError, naming the file, if one cannot be read.
    """
    if method == TRUNCATED:
        return ()
    parsed = parse(method)
    paths = [*files_of(parsed).values(), *_bundled(parsed.stages()), *_sources(parsed)]
    return tuple(map(_digest, paths))


def check_unchanged(cell: EvalCell) -> None:
    """Raises KvfoldError if a file that the cell's method reads is not the one it was planned with.

    So no record mixes two versions of a file, and no worker reads another machine's.
    """
    if cell.files != digests(cell.method):
        raise KvfoldError(
            f"a file that {cell.method} reads has changed since the run began: start it again, "
            "which evaluates the method with the new file"
        )


def _sources(method: Method) -> list[str]:
    """Files of the methods that are not kvfold's own; a notebook's have none."""
    modules = (sys.modules.get(name) for name in sorted(set(origins(method).values())))
    found = (getattr(module, "__file__", None) for module in modules)
    return [path for path in found if path]


def _bundled(stages: Stages) -> list[str]:
    """Paths of the bundled model's files that the stages read."""
    named = (each for each in Sources.of(stages) if isinstance(each, FittedFile))
    return [path_of(each) for each in named if each.file == NO_FILE]


def _digest(path: str) -> str:
    try:
        state = os.stat(path)
        return _digest_of(path, state.st_mtime_ns, state.st_size)
    except OSError as problem:
        raise KvfoldError(f"cannot read {path}: {problem.strerror or problem}") from problem


@lru_cache(maxsize=64)
def _digest_of(path: str, modified: int, size: int) -> str:
    with opened_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
