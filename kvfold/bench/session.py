# SPDX-License-Identifier: Apache-2.0
"""A run: every participant in turns, round after round, and a record of each at the round's end."""

from __future__ import annotations

import random
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import torch
from torch import Tensor

from kvfold.bench.lineup import Makers
from kvfold.bench.machine import Setup, commit
from kvfold.bench.participants import AGAIN, FullSide, Label, Side
from kvfold.bench.peak import WARM_UP
from kvfold.bench.record import Cell, Measured, Record
from kvfold.bench.sdpa_variants import fastest
from kvfold.bench.shapes import Shape, Subject

# Seconds before each turn, in which the threads of the process that had the last one fall asleep;
# for everyone, since a busy machine favours a process that has slept.
REST = 0.005
# Says what is being done.
Note = Callable[[str], None]


@dataclass(frozen=True)
class Session:
    """What the records of one run have in common; `setups` of each side that takes part."""

    subject: Subject
    shape: Shape
    setups: dict[str, Setup]
    commit: str | None
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @classmethod
    def of(cls, subject: Subject, peers: dict[str, Setup]) -> Session:
        """A new run on this machine; `peers` run in processes of their own."""
        here = Setup.here()
        setups = {"baseline": here, "kvfold": here, **peers}
        return cls(subject, subject.shape, setups, commit())

    def rounds(
        self,
        cell: Cell,
        makers: Makers,
        missing: dict[Label, int],
        note: Note,
    ) -> Iterator[list[Record]]:
        """Runs a cell until nobody misses a round: each yield is one round's records.

        The full cache takes part in all of them, and once more as its own noise; a peer's own full
        cache wherever the peer does.
        """
        if not missing:
            return
        note(f"{cell}: choosing the full cache's kernels")
        kernels = fastest(self.subject.model, cell.batch, cell.length)
        full: list[Side] = [FullSide(self.subject, kernels), FullSide(self.subject, kernels, AGAIN)]
        others = {label: make() for label, make in makers.items() if _joins(label, missing, 0)}
        ids = self.subject.tokens(cell.batch, cell.length + cell.new_tokens)
        for index in range(max(missing.values())):

            def say(text: str, number: int = index + 1) -> None:
                note(f"round {number}: {text}")

            joining = [side for label, side in others.items() if _joins(label, missing, index)]
            sides = full + joining
            peaks = {}
            if index == 0:
                peaks = _peaks(sides, cell, say)
                warm_up(sides, ids)
            measured = run_round(sides, ids, cell, random.Random(index), say)
            yield [
                self._record(cell, index, side, measured[side.label], peaks, str(kernels))
                for side in sides
            ]

    def _record(
        self,
        cell: Cell,
        index: int,
        side: Side,
        measured: Measured,
        peaks: dict[Label, int | None],
        baseline: str,
    ) -> Record:
        if side.label in peaks:
            peak = peaks[side.label]
            measured = measured.model_copy(update={"peak_bytes": peak or measured.peak_bytes})
        return Record(
            session=self.name,
            round=index,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            cell=cell,
            side=side.label.side,
            method=side.label.method,
            budget=side.label.budget,
            compiled=side.label.compiled,
            baseline=baseline,
            shape=self.shape,
            setup=self.setups[side.label.side],
            commit=self.commit,
            measured=measured,
        )


def _joins(label: Label, missing: dict[Label, int], index: int) -> bool:
    """Whether a participant misses round `index`, or is what one that does is measured against."""
    if missing.get(label, 0) > index:
        return True
    others = (other.side for other, rounds in missing.items() if rounds > index)
    return label.is_peer_full and label.side in others


def missing_rounds(
    records: Sequence[Record], cell: Cell, labels: Sequence[Label], repeats: int
) -> dict[Label, int]:
    """How many rounds of `cell` each of `labels` still has to run, where any."""
    done = Counter(record.label for record in records if record.cell == cell)
    return {label: repeats - done[label] for label in labels if done[label] < repeats}


@torch.no_grad()
def run_round(
    sides: Sequence[Side], ids: Tensor, cell: Cell, order: random.Random, note: Note
) -> dict[Label, Measured]:
    """One round: prompts one after the other, then decode steps in turn.

    `ids [B, length + new_tokens]` are what everyone reads: the tokens after the prompt too. The
    `order` changes at every turn, since who comes after whom matters to the processor's caches.
    """
    prompt, following = ids[:, : cell.length], ids[:, cell.length :]
    prefills, held = {}, {}
    steps: dict[Label, list[float]] = {side.label: [] for side in sides}
    for side in order.sample(sides, len(sides)):
        note(f"{cell}, prefill of {side.label}")
        time.sleep(REST)
        prefills[side.label] = side.prefill(prompt, cell.new_tokens)
    for index in range(cell.new_tokens):
        note(f"{cell}, token {index + 1} of {cell.new_tokens}")
        for side in order.sample(sides, len(sides)):
            time.sleep(REST)
            steps[side.label].append(side.step(following[:, index : index + 1]))
            if index == 0:
                held[side.label] = side.held()
    for side in sides:
        side.free()
    measured = {}
    for label, prefill in prefills.items():
        per_token = statistics.median(steps[label])
        measured[label] = Measured(
            prefill_seconds=prefill.seconds - prefill.compression,
            compression_seconds=prefill.compression,
            step_seconds=tuple(round(step, 7) for step in steps[label]),
            seconds_per_token=per_token,
            tokens_per_second=cell.batch / per_token,
            cache_bytes=held[label].nbytes,
            kept=held[label].kept,
            peak_bytes=prefill.peak,
        )
    return measured


@torch.no_grad()
def warm_up(sides: Sequence[Side], ids: Tensor) -> None:
    """A short prompt and a step for everyone, so that no first call is timed."""
    for side in sides:
        side.prefill(ids[:, :WARM_UP], 1)
        side.step(ids[:, :1])
        side.free()


def _peaks(sides: Sequence[Side], cell: Cell, note: Note) -> dict[Label, int | None]:
    """Each side's peak, but for the full cache's second part."""
    peaks = {}
    for side in sides:
        if side.label.method != AGAIN:
            note(f"{cell}, peak memory of {side.label}")
            peaks[side.label] = side.peak_alone(cell.batch, cell.length, cell.new_tokens)
    return peaks
