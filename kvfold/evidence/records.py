# SPDX-License-Identifier: Apache-2.0
"""Append-only JSONL files of records, durable against a killed run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from kvfold.errors import KvfoldError
from kvfold.writing import check_replaceable, replacing

M = TypeVar("M", bound=BaseModel)


def _lines(records: Iterable[BaseModel]) -> bytes:
    return b"".join(record.model_dump_json().encode() + b"\n" for record in records)


def _is_json(text: bytes) -> bool:
    """True for a whole JSON value, which no beginning of a record is."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class LoadedRecords(NamedTuple, Generic[M]):
    """Records of a file, and the number of bytes (`torn`) of a half-written last line, removed."""

    records: list[M]
    torn: int


class RecordFile(Generic[M]):
    """Append-only file at `path` with one record of type `kind` per line."""

    def __init__(self, path: Path, kind: type[M]) -> None:
        self.path, self.kind = path, kind

    def load(self) -> LoadedRecords[M]:
        """All records; an unfinished last line, left by a killed run, is removed from the file.

        A missing file has no records. Raises KvfoldError if a line is no record of this `kind`, or
        the file cannot be read.
        """
        check_replaceable(self.path)  # a pipe would be waited for
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return LoadedRecords([], 0)
        except OSError as problem:
            raise KvfoldError(f"cannot read {self.path}: {problem}") from problem
        whole, newline, rest = data.rpartition(b"\n")
        lines = whole.split(b"\n") if newline else []
        records = [self._parsed(number, line) for number, line in enumerate(lines, 1)]
        if rest and _is_json(rest):  # an editor has taken the line break
            records.append(self._parsed(len(lines) + 1, rest))
            self._append(b"\n")
            return LoadedRecords(records, 0)
        if rest:
            opening = f'{{"{next(iter(self.kind.model_fields))}":'.encode()
            if len(rest) < len(opening) and not lines:
                raise KvfoldError(self._foreign(1))  # too short to tell
            if rest[: len(opening)] != opening[: len(rest)]:
                raise KvfoldError(self._foreign(len(lines) + 1))
            os.truncate(self.path, len(data) - len(rest))
        return LoadedRecords(records, len(rest))

    def add(self, records: Iterable[M]) -> None:
        """Appends records; returns after fsync. Raises KvfoldError if they cannot be written."""
        self._append(_lines(records))

    def replace(self, records: Iterable[M]) -> None:
        """Writes the file anew, as a whole or not at all; errors as of `add`."""
        with replacing(self.path) as temporary:
            temporary.write_bytes(_lines(records))

    def _append(self, lines: bytes) -> None:
        check_replaceable(self.path)
        try:
            with self.path.open("ab") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as problem:
            raise KvfoldError(f"cannot write {self.path}: {problem}") from problem

    def _parsed(self, number: int, line: bytes) -> M:
        try:
            return self.kind.model_validate_json(line)
        except ValidationError as problem:
            raise KvfoldError(self._foreign(number)) from problem

    def _foreign(self, number: int) -> str:
        return (
            f"line {number} of {self.path} is no record that this version of kvfold writes there: "
            "nothing was changed; choose another --out"
        )
