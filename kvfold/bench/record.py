# SPDX-License-Identifier: Apache-2.0
"""One record per participant and round, and the file that they are added to."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kvfold.bench.machine import Setup
from kvfold.bench.shapes import Shape
from kvfold.bench.sides import Label
from kvfold.errors import KvfoldError

OPENING = b'{"session":'


class Cell(BaseModel):
    """What is measured: a model, a prompt's length, rows in a batch, tokens to decode."""

    model_config = ConfigDict(frozen=True)

    name: str
    dtype: str
    seed: int
    length: int
    batch: int
    new_tokens: int

    def __str__(self) -> str:
        rows = "" if self.batch == 1 else f", batch {self.batch}"
        return f"{self.name} {self.dtype}, {self.length:,} tokens{rows}"


class Measured(BaseModel):
    """What one participant took in one round.

    `prefill_seconds` and `compression_seconds` add up to the time to first token; what a method
    observes inside attention belongs to the former. `step_seconds` are the decode steps in order.
    `cache_bytes` and `kept` are taken when the first generated token is stored. `peak_bytes` is
    what the prefill took at most, itself included and the weights not: in a fresh process on a
    CPU, once per session, else None.
    """

    model_config = ConfigDict(frozen=True)

    prefill_seconds: float
    compression_seconds: float
    step_seconds: tuple[float, ...]
    seconds_per_token: float
    tokens_per_second: float
    cache_bytes: int
    kept: float
    peak_bytes: int | None

    @property
    def first_token_seconds(self) -> float:
        """From the prompt to the first token's logits."""
        return self.prefill_seconds + self.compression_seconds


class Line(BaseModel):
    """What every line tells. Only lines of one `session` and `round` were taken in turns."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    session: str
    round: int
    at: str
    side: str
    method: str
    budget: str | None
    baseline: str
    shape: Shape
    setup: Setup
    commit: str | None

    @property
    def label(self) -> Label:
        """Who was measured."""
        return Label(self.side, self.method, self.budget)


class Record(Line):
    """One participant in one round of a cell."""

    cell: Cell
    measured: Measured


L = TypeVar("L", bound=Line)


class Loaded(NamedTuple, Generic[L]):
    """What a file holds; `torn` bytes at its end were dropped, from a line half written."""

    records: list[L]
    torn: int


class Store(Generic[L]):
    """A file of records of one `kind` that is only ever added to."""

    def __init__(self, path: Path, kind: type[L]) -> None:
        self.path, self.kind = path, kind

    def load(self) -> Loaded[L]:
        """All records; a last line that a killed run left half written is cut off the file.

        Raises KvfoldError for a file that holds anything else.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return Loaded([], 0)
        except OSError as problem:
            raise KvfoldError(f"cannot read {self.path}: {problem}") from problem
        whole, newline, rest = data.rpartition(b"\n")
        lines = whole.split(b"\n") if newline else []
        records = [self._parsed(number, line) for number, line in enumerate(lines, 1)]
        if rest:
            if rest[: len(OPENING)] != OPENING[: len(rest)]:
                raise KvfoldError(self._foreign(len(lines) + 1))
            os.truncate(self.path, len(data) - len(rest))
        return Loaded(records, len(rest))

    def add(self, records: Iterable[L]) -> None:
        """Writes records, and returns when they are on the disk."""
        with self.path.open("ab") as file:
            for record in records:
                file.write(record.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _parsed(self, number: int, line: bytes) -> L:
        try:
            return self.kind.model_validate_json(line)
        except ValidationError as problem:
            raise KvfoldError(self._foreign(number)) from problem

    def _foreign(self, number: int) -> str:
        return (
            f"line {number} of {self.path} is no record of this version of kvfold bench: nothing "
            "was changed; choose another --out"
        )


def check_setup(records: Iterable[Line], setups: dict[str, Setup], path: Path) -> None:
    """Raises KvfoldError where records of a side in `setups` come from another machine."""
    for record in records:
        setup = setups.get(record.side)
        differences = setup.differences(record.setup) if setup else []
        if differences:
            raise KvfoldError(
                f"{path} was recorded elsewhere, so times cannot be compared: "
                f"{'; '.join(differences)}. Choose another --out"
            )
