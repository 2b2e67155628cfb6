# SPDX-License-Identifier: Apache-2.0
"""Summary of records: ratios to the full cache of the same round, and their spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfold.bench.answers import first_appending, place_of, size_ratio, time_ratio
from kvfold.bench.participants import FULL, ParticipantLabel
from kvfold.bench.record import BenchCell, RoundRecord
from kvfold.evidence.estimates import Quartiles


@dataclass(frozen=True)
class BenchRow:
    """One participant in one cell, over all its rounds.

    Seconds, tokens per second and `kept` are medians. `first_token`, `per_token`, `nbytes` and
    `peak` are ratios to the full cache of the same round; None if no round has both. Of whole
    answers, rounds of eviction included: `answer` is their time over the full cache's, `append`
    over that of a method that appends, `largest` as `answers.size_ratio` has it.
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


def rows(records: Sequence[RoundRecord], side: str = "baseline") -> list[BenchRow]:
    """One row per cell and participant, in order of the records, against the full cache of `side`.

    Ratios need the full cache of that side in the same session and round.
    """
    full = {
        (record.cell, record.session, record.round): record
        for record in records
        if record.side == side and record.method == FULL
    }
    appending = first_appending(records)
    grouped: dict[tuple[BenchCell, ParticipantLabel], list[RoundRecord]] = {}
    for record in records:
        grouped.setdefault((record.cell, record.label), []).append(record)
    return [_row(cell, label, group, full, appending) for (cell, label), group in grouped.items()]


def _row(
    cell: BenchCell,
    label: ParticipantLabel,
    group: list[RoundRecord],
    full: dict[tuple[BenchCell, str, int], RoundRecord],
    appending: dict[tuple[BenchCell, str, int, str | None], RoundRecord],
) -> BenchRow:
    """The row of one participant in one cell, from its records and those it is set against."""
    places = [(record.cell, record.session, record.round) for record in group]
    pairs = [
        (record, full[place]) for record, place in zip(group, places, strict=True) if place in full
    ]
    appended = [(record, appending.get(place_of(record))) for record in group]

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
        spread(time_ratio),
        Quartiles.of([time_ratio(record, base) for record, base in appended if base is not None]),
        Quartiles.of([size for size in map(size_ratio, group) if size is not None]),
    )


def step_ratio(record: RoundRecord, full: RoundRecord) -> float:
    """Median over decode steps of the step's time over the full cache's time for that step."""
    steps = zip(record.measured.step_seconds, full.measured.step_seconds, strict=True)
    return statistics.median(own / base for own, base in steps)


def _peak_ratio(record: RoundRecord, full: RoundRecord) -> float | None:
    peak, base = record.measured.peak_bytes, full.measured.peak_bytes
    return peak / base if peak is not None and base else None
