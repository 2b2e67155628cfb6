# SPDX-License-Identifier: Apache-2.0
"""A benchmark run: rounds in which all participants take turns, one record each per round."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from kvfold.bench.lineup import Makers
from kvfold.bench.models import BenchModel, ModelShape
from kvfold.bench.participants import (
    AGAIN,
    CacheSize,
    FullParticipant,
    Participant,
    ParticipantLabel,
    PrefillCost,
)
from kvfold.bench.record import BenchCell, Measurement, RoundRecord
from kvfold.bench.sdpa_variants import fastest
from kvfold.measure.machine import MachineSetup, commit
from kvfold.measure.peak import WARM_UP

# Pause in seconds before each turn. Threads of the previous participant's process go to sleep in
# it; all participants pause alike, as the scheduler favours a process that has slept.
REST = 0.005
# Progress callback: receives one line about the current step.
Note = Callable[[str], None]


@dataclass(frozen=True)
class BenchSession:
    """One run: its model, and the fields that all its records share.

    `setups` maps each side that takes part to its setup; `name` is random.
    """

    subject: BenchModel
    shape: ModelShape
    setups: dict[str, MachineSetup]
    commit: str | None
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @classmethod
    def of(cls, subject: BenchModel, peers: dict[str, MachineSetup]) -> BenchSession:
        """A new run on this machine; `peers` maps peers to the setups of their processes."""
        here = MachineSetup.here()
        setups = {"baseline": here, "kvfold": here, **peers}
        return cls(subject, subject.shape, setups, commit())

    def rounds(
        self, cell: BenchCell, makers: Makers, missing: dict[ParticipantLabel, int], note: Note
    ) -> Iterator[list[RoundRecord]]:
        """The records of each round, until every participant has its `missing` rounds.

        The full cache takes part twice in every round; the second shows the noise. A peer's full
        cache takes part in the rounds of that peer's methods.
        """
        if not missing:
            return
        note(f"{cell}: choosing the full cache's kernels")
        kernels = fastest(self.subject.model, cell.batch, cell.length)
        full: list[Participant] = [
            FullParticipant(self.subject, kernels),
            FullParticipant(self.subject, kernels, AGAIN),
        ]
        others = {label: make() for label, make in makers.items() if _joins(label, missing, 0)}
        ids = self.subject.tokens(cell.batch, cell.length + cell.new_tokens)
        for index in range(max(missing.values())):

            def say(text: str, number: int = index + 1) -> None:
                note(f"round {number}: {text}")

            joining = [each for label, each in others.items() if _joins(label, missing, index)]
            participants = full + joining
            peaks: dict[ParticipantLabel, int | None] = {}
            first_steps: dict[ParticipantLabel, float] = {}
            if index == 0:
                peaks = _peaks(participants, cell, say)
                first_steps = warm_up(participants, ids)
            measured = run_round(participants, ids, cell, random.Random(index), say)
            records = []
            for label in (each.label for each in participants):
                about = self.about(index, label, str(kernels))
                peak = peaks.get(label) or measured[label].peak_bytes
                graph = first_steps.get(label) if label.compiled else None
                own = measured[label].model_copy(
                    update={"peak_bytes": peak, "graph_seconds": graph}
                )
                records.append(RoundRecord(**about, cell=cell, measured=own))
            yield records

    def about(self, index: int, label: ParticipantLabel, baseline: str) -> dict[str, Any]:
        """The fields of `BenchRecord` for a participant in a round."""
        return dataclasses.asdict(label) | {
            "session": self.name,
            "round": index,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "baseline": baseline,
            "shape": self.shape,
            "setup": self.setups[label.side],
            "commit": self.commit,
        }


def _joins(label: ParticipantLabel, missing: dict[ParticipantLabel, int], index: int) -> bool:
    """True if the participant needs round `index`, or is the full cache of a peer that does."""
    if missing.get(label, 0) > index:
        return True
    others = (other.side for other, rounds in missing.items() if rounds > index)
    return label.is_peer_full and label.side in others


def missing_rounds(
    records: Sequence[RoundRecord],
    cell: BenchCell,
    labels: Sequence[ParticipantLabel],
    repeats: int,
) -> dict[ParticipantLabel, int]:
    """Rounds of `cell` that each participant still has to run; finished ones are left out."""
    done = Counter(record.label for record in records if record.cell == cell)
    return {label: repeats - done[label] for label in labels if done[label] < repeats}


@torch.no_grad()
def run_round(
    participants: Sequence[Participant],
    ids: Tensor,
    cell: BenchCell,
    order: random.Random,
    note: Note,
) -> dict[ParticipantLabel, Measurement]:
    """One round: every participant's prefill, then decode steps interleaved token by token.

    `ids [B, length + new_tokens]` hold the prompt and the tokens fed to the decode steps, equal for
    all. `order` shuffles the participants at every step, as the predecessor affects CPU caches.
    """
    prompt, following = ids[:, : cell.length], ids[:, cell.length :]
    prefills: dict[ParticipantLabel, PrefillCost] = {}
    sizes: dict[ParticipantLabel, CacheSize] = {}
    largest = {participant.label: 0 for participant in participants}
    steps: dict[ParticipantLabel, list[float]] = {each.label: [] for each in participants}
    for participant in order.sample(participants, len(participants)):
        note(f"{cell}, prefill of {participant.label}")
        time.sleep(REST)
        prefills[participant.label] = participant.prefill(prompt, cell.new_tokens)
    for index in range(cell.new_tokens):
        note(f"{cell}, token {index + 1} of {cell.new_tokens}")
        for participant in order.sample(participants, len(participants)):
            time.sleep(REST)
            steps[participant.label].append(participant.step(following[:, index : index + 1]))
            size = participant.cache_size()
            sizes.setdefault(participant.label, size)
            largest[participant.label] = max(largest[participant.label], size.nbytes)
    for participant in participants:
        participant.free()
    measured = {}
    for label, prefill in prefills.items():
        per_token = statistics.median(steps[label])
        measured[label] = Measurement(
            prefill_seconds=prefill.seconds - prefill.compression,
            compression_seconds=prefill.compression,
            step_seconds=tuple(round(step, 7) for step in steps[label]),
            seconds_per_token=per_token,
            tokens_per_second=cell.batch / per_token,
            cache_bytes=sizes[label].nbytes,
            kept=sizes[label].kept,
            peak_bytes=prefill.peak,
            largest_bytes=largest[label],
        )
    return measured


@torch.no_grad()
def warm_up(participants: Sequence[Participant], ids: Tensor) -> dict[ParticipantLabel, float]:
    """A short prefill and one decode step per participant, so that no round times a first call.

    Seconds of each one's step: of compiled participants those in which their graphs are made.
    """
    first_steps = {}
    for participant in participants:
        participant.prefill(ids[:, :WARM_UP], 1)
        first_steps[participant.label] = participant.step(ids[:, :1])
        participant.free()
    return first_steps


def _peaks(
    participants: Sequence[Participant], cell: BenchCell, note: Note
) -> dict[ParticipantLabel, int | None]:
    """Peak bytes of each participant's prefill; the full cache is measured once."""
    peaks = {}
    for each in participants:
        if each.label.method != AGAIN:
            note(f"{cell}, peak memory of {each.label}")
            peaks[each.label] = each.peak_alone(cell.batch, cell.length, cell.new_tokens)
    return peaks
