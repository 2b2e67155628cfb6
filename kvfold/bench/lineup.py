# SPDX-License-Identifier: Apache-2.0
"""Who takes part: kvfold's methods at each budget, and the peers' counterparts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvfold.bench.machine import Setup
from kvfold.bench.participants import CompiledSide, Label, MethodSide, Side
from kvfold.bench.record import Cell
from kvfold.bench.shapes import Subject
from kvfold.budget import Budget
from kvfold.errors import KvfoldError
from kvfold.methods.base import parse

Makers = dict[Label, Callable[[], Side]]


class Peer(Protocol):
    """Another library; `setup` is that of the process it runs in."""

    name: str
    setup: Setup

    def makers(self, wanted: Sequence[Label]) -> Makers:
        """Its participants, beside what is wanted of kvfold."""

    def left_out(self, label: Label, cell: Cell) -> str | None:
        """Why one of them cannot run a cell; None where it can, or is none of them."""

    def close(self) -> None:
        """Ends what it runs in."""


def labels(methods: Sequence[str], budgets: Sequence[str]) -> list[Label]:
    """Each method at each budget, or once where it takes none.

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


def makers(subject: Subject, wanted: Sequence[Label]) -> Makers:
    """How to make each participant; raises KvfoldError now where one cannot work."""
    made: Makers = {}
    for label in wanted:
        kind = CompiledSide if label.compiled else MethodSide
        make = partial(kind, subject, label.method, label.budget)
        make()
        made[label] = make
    return made


def compiled(subject: Subject, wanted: Sequence[Label]) -> tuple[list[Label], dict[Label, str]]:
    """Those of `wanted` once more, decoding by one graph; and why others cannot."""
    able, reasons = [], {}
    for label in wanted:
        try:
            able.append(CompiledSide(subject, label.method, label.budget).label)
        except KvfoldError as problem:
            reasons[dataclasses.replace(label, compiled=True)] = str(problem)
    return able, reasons
