# SPDX-License-Identifier: Apache-2.0
"""Throughput at the largest batch whose weights and cache fit under a memory cap."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from pydantic import BaseModel

from kvfold.bench.models import ModelSource
from kvfold.bench.participants import (
    FULL,
    FullParticipant,
    LocalParticipant,
    MethodParticipant,
    ParticipantLabel,
)
from kvfold.bench.record import BenchRecord
from kvfold.bench.sdpa_variants import SdpaChoice, fastest
from kvfold.bench.session import BenchSession, Note
from kvfold.errors import KvfoldError
from kvfold.methods.base import parse

# Decode steps between two readings of the cache size.
SIZE_INTERVAL = 64


class ThroughputCell(ModelSource, frozen=True):
    """A workload: `prompt` and `generated` tokens per row, and the `cap` on weights plus cache in
    bytes."""

    prompt: int
    generated: int
    cap: int

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}, {self.prompt}+{self.generated} tokens"


class BatchRun(BaseModel, frozen=True):
    """One run of a batch; `cache_bytes` is the cache's maximum.

    `tokens_per_second` counts generated tokens, over prefill and decode.
    """

    batch: int
    cache_bytes: int
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float


class ThroughputRecord(BenchRecord, frozen=True):
    """One participant in one round, at the largest batch under the cap."""

    load: ThroughputCell
    outcome: BatchRun


def sizes(text: str) -> tuple[int, int]:
    """Prompt and generated tokens of a text such as "256+1024"; raises KvfoldError for others."""
    found = re.fullmatch(r"\s*([1-9]\d*)\s*\+\s*([1-9]\d*)\s*", text)
    if found is None:
        raise KvfoldError(
            f'cannot read {text!r} as prompt+generation: write for example "256+1024"'
        )
    return int(found[1]), int(found[2])


def throughput_labels(methods: Sequence[str], prompt: int) -> list[ParticipantLabel]:
    """Labels of the full cache and of each method, whose budget is `prompt` tokens.

    Raises KvfoldError for a method that cannot be read.
    """
    parsed = [parse(method) for method in methods]
    others = [
        ParticipantLabel("kvfold", str(method), str(prompt) if method.takes_budget else None)
        for method in parsed
        if str(method) != FULL
    ]
    return [ParticipantLabel("baseline", FULL), *dict.fromkeys(others)]


@dataclass(frozen=True)
class ThroughputRunner:
    """Runs participants under one workload; `note` receives progress."""

    session: BenchSession
    load: ThroughputCell
    note: Note

    @property
    def room(self) -> int:
        """Bytes under the cap that the weights leave for the cache."""
        return self.load.cap - self.session.shape.weight_bytes

    def rounds(
        self, missing: dict[ParticipantLabel, int], known: dict[ParticipantLabel, int]
    ) -> Iterator[ThroughputRecord]:
        """One record per participant and round, until each has its `missing` rounds.

        `known` are largest batches found by earlier runs. Raises KvfoldError if one row alone
        exceeds the cap.
        """
        batches = dict(known)
        self.note(f"{self.load}: choosing the full cache's kernels")
        length = self.load.prompt + self.load.generated
        kernels = fastest(self.session.subject.model, 1, length)
        for index in range(max(missing.values(), default=0)):
            turn = [label for label, rounds in missing.items() if rounds > index]
            for label in random.Random(index).sample(turn, len(turn)):
                if label in batches:
                    outcome = self.run(label, kernels, batches[label])
                else:
                    outcome = largest(partial(self.run, label, kernels), self.room)
                    batches[label] = outcome.batch
                about = self.session.about(index, label, str(kernels))
                yield ThroughputRecord(**about, load=self.load, outcome=outcome)

    @torch.no_grad()
    def run(self, label: ParticipantLabel, kernels: SdpaChoice, batch: int) -> BatchRun:
        """Prefill and decode of `batch` rows by one participant."""
        load, subject = self.load, self.session.subject
        participant: LocalParticipant
        if label.side == "baseline":
            participant = FullParticipant(subject, kernels)
        else:
            participant = MethodParticipant(subject, label.method, label.budget)
        ids = subject.tokens(batch, load.prompt + load.generated)
        self.note(f"{load}: {label}, batch {batch}, prefill")
        prefill = participant.prefill(ids[:, : load.prompt], load.generated)
        most, decode = participant.cache_size().nbytes, 0.0
        for index in range(load.generated):
            at = load.prompt + index
            decode += participant.step(ids[:, at : at + 1])
            if index % SIZE_INTERVAL == 0 or index == load.generated - 1:
                most = max(most, participant.cache_size().nbytes)
                self.note(f"{load}: {label}, batch {batch}, token {index + 1}")
        participant.free()
        return BatchRun(
            batch=batch,
            cache_bytes=most,
            prefill_seconds=prefill.seconds,
            decode_seconds=decode,
            tokens_per_second=batch * load.generated / (prefill.seconds + decode),
        )


def largest(run: Callable[[int], BatchRun], room: int) -> BatchRun:
    """The run of the largest batch whose cache takes at most `room` bytes.

    Each run's bytes per row predict the next batch to try, until no larger one fits. Raises
    KvfoldError if one row takes more than `room`.
    """
    tried = {1: run(1)}
    if tried[1].cache_bytes > room:
        raise KvfoldError(
            f"one row's cache takes {tried[1].cache_bytes:,} bytes, and the cap leaves {room:,} "
            "beside the weights: raise it"
        )
    batch = room // tried[1].cache_bytes
    while True:
        if batch not in tried:
            tried[batch] = run(batch)
        fits = room * batch // tried[batch].cache_bytes
        if tried[batch].cache_bytes > room:
            batch = min(fits, batch - 1)
        elif fits > batch and fits not in tried:
            batch = fits
        else:
            return tried[batch]
