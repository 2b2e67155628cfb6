# SPDX-License-Identifier: Apache-2.0
"""Records of `kvfold bench`, one per participant and round, and the check that they compare."""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path

from pydantic import BaseModel

from kvfold.bench.models import ModelShape, ModelSource
from kvfold.bench.participants import ParticipantLabel
from kvfold.errors import KvfoldError
from kvfold.measure.machine import MachineSetup


class BenchCell(ModelSource, frozen=True):
    """A measured workload: model, dtype, prompt length in tokens, batch rows, tokens to decode."""

    length: int
    batch: int
    new_tokens: int

    def __str__(self) -> str:
        rows = "" if self.batch == 1 else f", batch {self.batch}"
        return f"{self.name} {self.dtype}, {self.length:,} tokens{rows}"


class Measurement(BaseModel, frozen=True):
    """Times and memory of one participant in one round.

    Time to first token is `prefill_seconds` + `compression_seconds`; observations inside attention
    count as prefill. `step_seconds` has one entry per decode step, `seconds_per_token` is their
    median. `cache_bytes` and `kept` (entries stored over entries seen) are taken after the first
    decode step. `peak_bytes` is the prefill's peak without the weights; on a CPU it is measured
    once per session, in a fresh process, and None in the other rounds. `largest_bytes` are the most
    that the cache took after any decode step; None in records of older versions. `graph_seconds`
    is the first step of a compiled participant, which makes its graphs or finds those of another
    participant or process; None of others, and in the other rounds of a session.
    """

    prefill_seconds: float
    compression_seconds: float
    step_seconds: tuple[float, ...]
    seconds_per_token: float
    tokens_per_second: float
    cache_bytes: int
    kept: float
    peak_bytes: int | None
    largest_bytes: int | None = None
    graph_seconds: float | None = None

    @property
    def first_token_seconds(self) -> float:
        """Time to first token."""
        return self.prefill_seconds + self.compression_seconds


class BenchRecord(BaseModel, frozen=True, extra="forbid"):
    """Fields common to all records.

    Participants of one `session` and `round` ran interleaved, so only their times compare. `at` is
    the UTC time of writing; `baseline` names the full cache's attention kernels.
    """

    session: str
    round: int
    at: str
    side: str
    method: str
    budget: str | None
    compiled: bool = False
    baseline: str
    shape: ModelShape
    setup: MachineSetup
    commit: str | None

    @property
    def label(self) -> ParticipantLabel:
        """The participant."""
        return ParticipantLabel(self.side, self.method, self.budget, self.compiled)


class RoundRecord(BenchRecord, frozen=True):
    """One participant in one round of a cell."""

    cell: BenchCell
    measured: Measurement


def check_shape(
    records: Iterable[RoundRecord], cells: Container[BenchCell], shape: ModelShape, path: Path
) -> None:
    """Raises KvfoldError if the file at `path` has records of `cells` of a model of another shape.

    A folder may hold another model under the same name than before.
    """
    for record in records:
        if record.cell in cells and record.shape != shape:
            raise KvfoldError(
                f"{path} was recorded of another model of the name {record.cell.name}: choose "
                "another --out"
            )


def check_setup(
    records: Iterable[BenchRecord], setups: dict[str, MachineSetup], path: Path
) -> None:
    """Raises KvfoldError if the file at `path` has records of another machine or other versions.

    `setups` maps each side that takes part to its setup.
    """
    for record in records:
        setup = setups.get(record.side)
        differences = setup.differences(record.setup) if setup else []
        if differences:
            raise KvfoldError(
                f"{path} was recorded elsewhere, so times cannot be compared: "
                f"{'; '.join(differences)}. Choose another --out"
            )
