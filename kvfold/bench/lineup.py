# SPDX-License-Identifier: Apache-2.0
"""Participants of a run: kvfold's methods at each budget, and the protocol of peer libraries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvfold.bench.machine import Setup
from kvfold.bench.participants import CompiledSide, Label, MethodSide, Side
from kvfold.bench.record import Cell
from kvfold.bench.shapes import BenchModel
from kvfold.budget import Budget
from kvfold.errors import KvfoldError
from kvfold.methods.base import parse

# Constructors of participants; each call makes one with an empty cache.
Makers = dict[Label, Callable[[], Side]]


class Peer(Protocol):
    """Another library that takes part; `setup` describes the process it runs in."""

    name: str
    setup: Setup

    def makers(self, wanted: Sequence[Label]) -> Makers:
        """Constructors of the peer's participants, given kvfold's `wanted` ones."""

    def left_out(self, label: Label, cell: Cell) -> str | None:
        """Reason why the peer cannot run `label` in a cell; None if it can, or does not own it."""

    def close(self) -> None:
        """Ends the peer's process, if it has one."""


def labels(methods: Sequence[str], budgets: Sequence[str]) -> list[Label]:
    """Labels of each method at each budget; a method without budget appears once.

    Raises KvfoldError for a method or a budget that cannot be read.
    """
    for budget in budgets:
        Budget.of(budget)
    parsed = [parse(method) for method in methods]
    found = [
        Label("kvfold", str(method), budget)
        for method in parsed
        for budget in (budgets if method.takes_budget else (None,))
    ]
    return list(dict.fromkeys(found))


def makers(subject: BenchModel, wanted: Sequence[Label]) -> Makers:
    """Constructors of kvfold's participants; raises KvfoldError at once if one cannot run."""
    made: Makers = {}
    for label in wanted:
        kind = CompiledSide if label.compiled else MethodSide
        make = partial(kind, subject, label.method, label.budget)
        make()
        made[label] = make
    return made


def compiled(subject: BenchModel, wanted: Sequence[Label]) -> tuple[list[Label], dict[Label, str]]:
    """Labels of `wanted` with compiled decode steps, and the reasons why others cannot compile."""
    able, reasons = [], {}
    for label in wanted:
        try:
            able.append(CompiledSide(subject, label.method, label.budget).label)
        except KvfoldError as problem:
            reasons[dataclasses.replace(label, compiled=True)] = str(problem)
    return able, reasons
