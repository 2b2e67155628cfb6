# SPDX-License-Identifier: Apache-2.0
"""Participants of a run: kvfold's methods at each budget, and the protocol of peer libraries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvfold.bench.models import BenchModel
from kvfold.bench.participants import (
    CompiledParticipant,
    MethodParticipant,
    Participant,
    ParticipantLabel,
)
from kvfold.bench.record import BenchCell
from kvfold.budget import Budget
from kvfold.errors import KvfoldError
from kvfold.measure.machine import MachineSetup
from kvfold.methods.base import parse

# Constructors of participants; each call makes one with an empty cache.
Makers = dict[ParticipantLabel, Callable[[], Participant]]


class Peer(Protocol):
    """Another library that takes part; `setup` describes the process it runs in."""

    name: str
    setup: MachineSetup

    def makers(self, wanted: Sequence[ParticipantLabel]) -> Makers:
        """Constructors of the peer's participants, given kvfold's `wanted` ones."""

    def left_out(self, label: ParticipantLabel, cell: BenchCell) -> str | None:
        """Reason why the peer cannot run `label` in a cell; None if it can, or does not own it."""

    def close(self) -> None:
        """Ends the peer's process, if it has one."""


def labels(methods: Sequence[str], budgets: Sequence[str]) -> list[ParticipantLabel]:
    """Labels of each method at each budget; a method without budget appears once.

    Raises KvfoldError for a method or a budget that cannot be read.
    """
    for budget in budgets:
        Budget.of(budget)
    parsed = [parse(method) for method in methods]
    found = [
        ParticipantLabel("kvfold", str(method), budget)
        for method in parsed
        for budget in (budgets if method.takes_budget else (None,))
    ]
    return list(dict.fromkeys(found))


def makers(subject: BenchModel, wanted: Sequence[ParticipantLabel]) -> Makers:
    """Constructors of kvfold's participants; raises KvfoldError at once if one cannot run."""
    made: Makers = {}
    for label in wanted:
        kind = CompiledParticipant if label.compiled else MethodParticipant
        make = partial(kind, subject, label.method, label.budget)
        make()
        made[label] = make
    return made


def compiled(
    subject: BenchModel, wanted: Sequence[ParticipantLabel]
) -> tuple[list[ParticipantLabel], dict[ParticipantLabel, str]]:
    """Labels of `wanted` with compiled decode steps, and the reasons why others cannot compile."""
    able, reasons = [], {}
    for label in wanted:
        try:
            able.append(CompiledParticipant(subject, label.method, label.budget).label)
        except KvfoldError as problem:
            reasons[dataclasses.replace(label, compiled=True)] = str(problem)
    return able, reasons
