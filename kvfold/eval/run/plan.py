# SPDX-License-Identifier: Apache-2.0
"""What is to be run: every task's samples, and the methods and budgets they meet."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from kvfold.budget import Budget
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import CUT, FULL, RANDOM, SINKS_AND_RECENT, Cell, Protocol, Subject
from kvfold.eval.run.job import Job
from kvfold.eval.run.sample import digest
from kvfold.eval.tasks import Record, Request, Task, Unreadable, source
from kvfold.methods.base import parse

Contender = tuple[str, str | None]


def contenders(methods: Sequence[str], budgets: Sequence[str]) -> list[Contender]:
    """Methods with their budgets, and before them those that a method must be better than.

    Each as kvfold writes it, so that "20%" and "0.2" are the same. Raises KvfoldError for an
    unknown method or budget, and for methods that need one where there is none.
    """
    named = [parse(method) for method in methods]
    amounts = list(dict.fromkeys(written(Budget.of(budget)) for budget in budgets))
    found: list[Contender] = [(FULL, None)]
    for baseline in (CUT, RANDOM, SINKS_AND_RECENT):
        found += [(baseline, amount) for amount in amounts]
    for method in named:
        if method.takes_budget and not amounts:
            raise KvfoldError(f"{method} needs a budget: give --budgets, for example 0.2,0.1")
        own = [*amounts] if method.takes_budget else [None]
        found += [(str(method), amount) for amount in own]
    return list(dict.fromkeys(found))


def written(budget: Budget) -> str:
    """A budget as text that says again what it is."""
    if budget.kind == "ratio":
        # Without an exponent, which no budget is written with.
        return format(Decimal(repr(float(budget.amount))), "f")
    return f"{int(budget.amount)}{'B' if budget.kind == 'bytes' else ''}"


def streams(method: str) -> bool:
    """Whether a text without a prompt is compressed at all: while it is read, token by token."""
    if method == CUT:
        return False
    stages = parse(method).stages()
    only_encoded = stages.score is None and stages.encode is not None
    return method == FULL or stages.decode == "hold" or only_encoded


@dataclass(frozen=True)
class Wanted:
    """A task at a length, where it has one, and its samples."""

    task: Task
    length: int | None
    request: Request
    samples: tuple[Record | Unreadable, ...]

    @classmethod
    def of(cls, task: Task, request: Request) -> Wanted:
        """Draws the samples; raises KvfoldError where there is nothing to draw from."""
        length = request.length if task.generated or task.phase == "stream" else None
        return cls(task, length, request, tuple(task.records(request)))

    def cells(
        self, subject: Subject, protocol: Protocol, contenders: Sequence[Contender]
    ) -> list[Cell]:
        """What these samples meet; of a text that is streamed, those that then do something."""
        request = self.request
        data = (request.data, request.haystack, request.words, request.shots)
        return [
            Cell(
                subject=subject,
                task=self.task.name,
                length=self.length,
                seed=request.seed,
                data=tuple(source.name_of(one) for one in data if one is not None),
                protocol=protocol,
                method=method,
                budget=budget,
            )
            for method, budget in contenders
            if self.task.phase != "stream" or streams(method)
        ]


@dataclass(frozen=True)
class Plan:
    """All cells with their samples, and what of them is not done."""

    wanted: tuple[Wanted, ...]
    subject: Subject
    protocol: Protocol
    contenders: tuple[Contender, ...]

    def cells(self) -> dict[Cell, Wanted]:
        """Every cell, in the order in which they are shown."""
        return {
            cell: each
            for each in self.wanted
            for cell in each.cells(self.subject, self.protocol, self.contenders)
        }

    @property
    def total(self) -> int:
        """How many samples there will be, over all cells."""
        return sum(len(each.samples) for each in self.cells().values())

    def jobs(self, done: Mapping[tuple[Cell, int], str]) -> Iterator[Job]:
        """What is missing, a sample's budgets together; `done` holds the digests of what is not.

        Raises KvfoldError where another text was evaluated under the same number.
        """
        for each in self.wanted:
            cells = each.cells(self.subject, self.protocol, self.contenders)
            for index, sample in enumerate(each.samples):
                text = digest(sample)
                for cell in cells:
                    if done.get((cell, index), text) != text:
                        raise KvfoldError(
                            f"sample {index} of {cell.task} is not the one that was evaluated "
                            "before: the data, or how it is drawn, has changed. Choose another "
                            "--out"
                        )
                missing = [cell for cell in cells if (cell, index) not in done]
                for _, group in itertools.groupby(missing, key=lambda cell: cell.method):
                    yield Job(index, sample, tuple(group))
