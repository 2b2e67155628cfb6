# SPDX-License-Identifier: Apache-2.0
"""Records of one or several evaluations, read from their files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.cell_result import CellResult
from kvfold.eval.run.run_folder import RECORDS
from kvfold.reading import read_bytes


def load_results(paths: Iterable[Path]) -> list[CellResult]:
    """All results of `paths`, each cell once; a path is a file, or a folder searched at any depth.

    Raises KvfoldError, naming file and line, for a line that is no record, and for a cell recorded
    twice with different outcomes; also if a file cannot be read, or there is no record at all.
    """
    found: dict[EvalCell, tuple[CellResult, str]] = {}
    for path in dict.fromkeys(file for given in paths for file in _files(given)):
        for number, line in enumerate(_lines(path), 1):
            if line.strip():
                _add(found, _parsed(line, path, number), f"line {number} of {path}")
    if not found:
        raise KvfoldError("the files given hold no records: `kvfold eval` writes them")
    return [result for result, _ in found.values()]


def _files(given: Path) -> list[Path]:
    if not given.is_dir():
        return [given]
    files = sorted(given.rglob(RECORDS))
    if not files:
        raise KvfoldError(f"no {RECORDS} in {given}: `kvfold eval` writes it")
    return files


def _lines(path: Path) -> list[bytes]:
    try:
        return read_bytes(path).split(b"\n")
    except OSError as problem:
        raise KvfoldError(f"cannot read {path}: {problem.strerror or problem}") from problem


def _parsed(line: bytes, path: Path, number: int) -> CellResult:
    try:
        return CellResult.model_validate_json(line)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise KvfoldError(
            f"line {number} of {path} is no record of this version of kvfold eval: "
            f"{f'{where}: ' if where else ''}{first['msg']}. The same `kvfold eval` again makes "
            "records anew from its samples"
        ) from problem


def _add(found: dict[EvalCell, tuple[CellResult, str]], result: CellResult, place: str) -> None:
    known, before = found.setdefault(result.cell, (result, place))
    if known != result:
        raise KvfoldError(
            f"{result.cell}: recorded twice, with different outcomes, in {before} and in {place}: "
            "give one of the two"
        )
