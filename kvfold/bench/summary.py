# SPDX-License-Identifier: Apache-2.0
"""Summary of records: ratios to the full cache of the same round, and their spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from kvfold.bench.models import DTYPES
from kvfold.bench.participants import FULL, ParticipantLabel
from kvfold.bench.record import BenchCell, RoundRecord
from kvfold.budget import Budget
from kvfold.errors import KvfoldError
from kvfold.evidence.estimates import Quartiles
from kvfold.evidence.grouped import grouped
from kvfold.methods.base import Stages, parse
from kvfold.methods.stages.when import AtEnd

# Cell, session, round and budget
_Place = tuple[BenchCell, str, int, str | None]


@dataclass(frozen=True)
class BenchRow:
    """One participant in one cell, over all its rounds.

    Seconds, tokens per second and `kept` are medians. `first_token`, `per_token`, `nbytes` and
    `peak` are ratios to the full cache of the same round; None if no round has both. Of whole
    answers, rounds of eviction included: `answer` is their time over the full cache's, `append`
    over that of a method that appends, `largest` as `_size_ratio` has it. `graph_seconds` is the
    median over sessions, None of participants without graphs.
    """

    cell: BenchCell
    label: ParticipantLabel
    rounds: int
    prefill_seconds: float
    compression_seconds: float
    seconds_per_token: float
    tokens_per_second: float
    kept: float
    first_token: Quartiles | None
    per_token: Quartiles | None
    nbytes: Quartiles | None
    peak: Quartiles | None
    answer: Quartiles | None
    append: Quartiles | None
    largest: Quartiles | None
    graph_seconds: float | None


def rows(records: Sequence[RoundRecord], side: str = "baseline") -> list[BenchRow]:
    """One row per cell and participant, in order of the records, against the full cache of `side`.

    Ratios need the full cache of that side in the same session and round.
    """
    full = {
        (record.cell, record.session, record.round): record
        for record in records
        if record.side == side and record.method == FULL
    }
    appending = _first_appending(records)
    groups = grouped(((record.cell, record.label), record) for record in records)
    return [_row(cell, label, group, full, appending) for (cell, label), group in groups.items()]


def _place_of(record: RoundRecord) -> _Place:
    """The place where participants of one budget are set against one another."""
    return record.cell, record.session, record.round, record.budget


def _row(
    cell: BenchCell,
    label: ParticipantLabel,
    group: list[RoundRecord],
    full: dict[tuple[BenchCell, str, int], RoundRecord],
    appending: dict[_Place, RoundRecord],
) -> BenchRow:
    """The row of one participant in one cell, from its records and those it is set against."""
    places = [(record.cell, record.session, record.round) for record in group]
    pairs = [
        (record, full[place]) for record, place in zip(group, places, strict=True) if place in full
    ]
    appended = [(record, appending.get(_place_of(record))) for record in group]
    graphs = [r.measured.graph_seconds for r in group if r.measured.graph_seconds is not None]

    def middle(value: Callable[[RoundRecord], float]) -> float:
        return statistics.median(value(record) for record in group)

    def spread(ratio: Callable[[RoundRecord, RoundRecord], float | None]) -> Quartiles | None:
        ratios = [ratio(record, base) for record, base in pairs]
        return Quartiles.of([value for value in ratios if value is not None])

    return BenchRow(
        cell,
        label,
        len(group),
        middle(lambda r: r.measured.prefill_seconds),
        middle(lambda r: r.measured.compression_seconds),
        middle(lambda r: r.measured.seconds_per_token),
        middle(lambda r: r.measured.tokens_per_second),
        middle(lambda r: r.measured.kept),
        spread(lambda r, f: r.measured.first_token_seconds / f.measured.first_token_seconds),
        spread(step_ratio),
        spread(lambda r, f: r.measured.cache_bytes / f.measured.cache_bytes),
        spread(_peak_ratio),
        spread(_time_ratio),
        Quartiles.of([_time_ratio(record, base) for record, base in appended if base is not None]),
        Quartiles.of([size for size in map(_size_ratio, group) if size is not None]),
        statistics.median(graphs) if graphs else None,
    )


def step_ratio(record: RoundRecord, full: RoundRecord) -> float:
    """Median over decode steps of the step's time over the full cache's time for that step."""
    steps = zip(record.measured.step_seconds, full.measured.step_seconds, strict=True)
    return statistics.median(own / base for own, base in steps)


def _peak_ratio(record: RoundRecord, full: RoundRecord) -> float | None:
    peak, base = record.measured.peak_bytes, full.measured.peak_bytes
    return peak / base if peak is not None and base else None


@cache
def _stages_of(label: ParticipantLabel) -> Stages | None:
    """The stages of an eager method of kvfold; None of others, and of the full cache."""
    if label.side != "kvfold" or label.method == FULL or label.compiled:
        return None
    try:
        return parse(label.method).stages()
    except KvfoldError:  # a plugin's, in a file of records that was written with it
        return None


def _first_appending(records: Sequence[RoundRecord]) -> dict[_Place, RoundRecord]:
    """The first record of each round and budget whose method appends generated tokens."""
    found: dict[_Place, RoundRecord] = {}
    for record in records:
        stages = _stages_of(record.label)
        if stages is not None and isinstance(stages.when, AtEnd) and record.budget is not None:
            found.setdefault(_place_of(record), record)
    return found


def _time_ratio(record: RoundRecord, other: RoundRecord) -> float:
    """Time of a whole answer over that of another one."""
    return sum(record.measured.step_seconds) / sum(other.measured.step_seconds)


def _size_ratio(record: RoundRecord) -> float | None:
    """Most bytes of an answer over those of its size and one round's entries.

    None for methods without rounds, and for budgets that are no number of tokens.
    """
    stages, most = _stages_of(record.label), record.measured.largest_bytes
    if stages is None or stages.rounds is None or most is None or record.budget is None:
        return None
    budget = Budget.of(record.budget)
    if budget.kind != "tokens":
        return None
    shape, cell = record.shape, record.cell
    entry = 2 * shape.layers * shape.kv_heads * shape.head_size * DTYPES[cell.dtype].itemsize
    return most / (entry * cell.batch * (int(budget.amount) + stages.rounds.every))
