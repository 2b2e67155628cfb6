# SPDX-License-Identifier: Apache-2.0
"""Long answers of methods that evict in rounds: what they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from kvfold.bench.models import DTYPES
from kvfold.bench.participants import FULL, ParticipantLabel
from kvfold.bench.record import BenchCell, RoundRecord
from kvfold.budget import Budget
from kvfold.errors import KvfoldError
from kvfold.methods.base import Stages, parse
from kvfold.methods.stages.when import AtEnd


@cache
def stages_of(label: ParticipantLabel) -> Stages | None:
    """The stages of an eager method of kvfold; None of others, and of the full cache."""
    if label.side != "kvfold" or label.method == FULL or label.compiled:
        return None
    try:
        return parse(label.method).stages()
    except KvfoldError:  # a plugin's, in a file of records that was written with it
        return None


def place_of(record: RoundRecord) -> tuple[BenchCell, str, int, str | None]:
    """The place where participants of one budget are set against one another."""
    return record.cell, record.session, record.round, record.budget


def first_appending(
    records: Sequence[RoundRecord],
) -> dict[tuple[BenchCell, str, int, str | None], RoundRecord]:
    """The first record of each round and budget whose method appends generated tokens."""
    found: dict[tuple[BenchCell, str, int, str | None], RoundRecord] = {}
    for record in records:
        stages = stages_of(record.label)
        if stages is not None and isinstance(stages.when, AtEnd) and record.budget is not None:
            found.setdefault(place_of(record), record)
    return found


def time_ratio(record: RoundRecord, other: RoundRecord) -> float:
    """Time of a whole answer over that of another one."""
    return sum(record.measured.step_seconds) / sum(other.measured.step_seconds)


def size_ratio(record: RoundRecord) -> float | None:
    """Most bytes of an answer over those of its size and one round's entries.

    None for methods without rounds, and for budgets that are no number of tokens.
    """
    stages, most = stages_of(record.label), record.measured.largest_bytes
    if stages is None or stages.rounds is None or most is None or record.budget is None:
        return None
    budget = Budget.of(record.budget)
    if budget.kind != "tokens":
        return None
    shape, cell = record.shape, record.cell
    entry = 2 * shape.layers * shape.kv_heads * shape.head_size * DTYPES[cell.dtype].itemsize
    return most / (entry * cell.batch * (int(budget.amount) + stages.rounds.every))
