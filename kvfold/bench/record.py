# SPDX-License-Identifier: Apache-2.0
"""One record per participant and round, and which of them can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kvfold.bench.machine import Setup
from kvfold.bench.participants import Label
from kvfold.bench.shapes import Shape
from kvfold.errors import KvfoldError


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
    compiled: bool = False
    baseline: str
    shape: Shape
    setup: Setup
    commit: str | None

    @property
    def label(self) -> Label:
        """Who was measured."""
        return Label(self.side, self.method, self.budget, self.compiled)


class Record(Line):
    """One participant in one round of a cell."""

    cell: Cell
    measured: Measured


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
