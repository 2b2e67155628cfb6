# SPDX-License-Identifier: Apache-2.0
"""Plan of a run: the samples of every task, and the methods and budgets to evaluate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeVar

from kvfold.budget import Budget
from kvfold.cache.copy_to_budget import reading_together
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import (
    FULL,
    RANDOM,
    SINKS_AND_RECENT,
    TRUNCATED,
    EvalCell,
    EvalProtocol,
    EvaluatedModel,
)
from kvfold.eval.run.job import EvalJob
from kvfold.eval.run.read_files import digests
from kvfold.eval.run.sample_result import sample_digest
from kvfold.eval.tasks import SampleRequest, Task, TaskSample, UnreadableSample, source
from kvfold.evidence.grouped import grouped
from kvfold.methods.base import parse

T = TypeVar("T")

# A method and its budget, both as text; None for a method without budget.
Contender = tuple[str, str | None]
# Of one job: its cells times its samples, so that it takes minutes.
MOST_RESULTS = 500


def contenders(methods: Sequence[str], budgets: Sequence[str]) -> list[Contender]:
    """The baselines and the methods, each at every budget.

    Texts are normalised, so that "20%" and "0.2" are one budget. Raises KvfoldError for an unknown
    method or budget, and for a method that needs a budget if there is none.
    """
    named = [parse(method) for method in methods]
    amounts = list(dict.fromkeys(written(Budget.of(budget)) for budget in budgets))
    found: list[Contender] = [(FULL, None)]
    for baseline in (TRUNCATED, RANDOM, SINKS_AND_RECENT):
        found += [(baseline, amount) for amount in amounts]
    for method in named:
        if method.takes_budget and not amounts:
            raise KvfoldError(f"{method} needs a budget: give --budgets, for example 0.2,0.1")
        own = [*amounts] if method.takes_budget else [None]
        found += [(str(method), amount) for amount in own]
    return list(dict.fromkeys(found))


def as_list(given: Any) -> list[Any]:
    """A list of what is given as one or as several."""
    return list(given) if isinstance(given, list | tuple) else [given]


def written(budget: Budget) -> str:
    """A budget as text that `Budget.of` reads back."""
    if budget.kind == "ratio":
        # Budgets are read without exponents, so 1e-05 is written as 0.00001.
        return format(Decimal(repr(float(budget.amount))), "f")
    return f"{int(budget.amount)}{'B' if budget.kind == 'bytes' else ''}"


def streams(method: str) -> bool:
    """True if the method can be evaluated on a text read token by token.

    These are the full cache, methods that evict while decoding, and plain quantization.
    """
    if method == TRUNCATED:
        return False
    stages = parse(method).stages()
    only_encoded = stages.score is None and stages.encode is not None
    return method == FULL or stages.evicts_while_decoding or only_encoded


@dataclass(frozen=True)
class TaskSamples:
    """A task and its samples; `length` in tokens for generated ones and streams, else None."""

    task: Task
    length: int | None
    request: SampleRequest
    samples: tuple[TaskSample | UnreadableSample, ...]

    @classmethod
    def of(cls, task: Task, request: SampleRequest) -> TaskSamples:
        """The task with drawn samples; raises KvfoldError if there is nothing to draw from."""
        length = request.length if source.at_lengths(task, request) else None
        return cls(task, length, request, tuple(task.samples(request)))

    @property
    def in_batches(self) -> bool:
        """True if several samples may be run together: streams, or one turn, as many questions."""
        if self.task.phase == "stream":
            return True
        read = [sample for sample in self.samples if isinstance(sample, TaskSample)]
        turns = any(sample.conversation for sample in read)
        alike = len({len(sample.questions) for sample in read}) == 1
        return self.task.phase == "prefill" and not (self.task.by_likelihood or turns) and alike

    def reading_together(self, cells: Sequence[EvalCell]) -> list[list[EvalCell]]:
        """The cells in groups that may share a reading, which observes what all of them need."""
        alone = [cell for cell in cells if self.task.phase == "stream" or cell.method == TRUNCATED]
        shared = [cell for cell in cells if cell not in alone]
        together = reading_together(shared, lambda cell: parse(cell.method))
        return [*(group for _, group in together), *([cell] for cell in alone)]

    def cells(
        self, subject: EvaluatedModel, protocol: EvalProtocol, contenders: Sequence[Contender]
    ) -> list[EvalCell]:
        """One cell per contender; for streamed texts only contenders with `streams(method)`."""
        request = self.request
        data = (request.data, request.haystack, request.words, request.shots)
        return [
            EvalCell(
                subject=subject,
                task=self.task.name,
                length=self.length,
                seed=request.seed,
                data=tuple(source.name_of(one) for one in data if one is not None),
                protocol=protocol,
                method=method,
                budget=budget,
                files=digests(method),
            )
            for method, budget in contenders
            if self.task.phase != "stream" or streams(method)
        ]


@dataclass(frozen=True)
class EvalPlan:
    """All cells of a run and their samples, of which `batch_size` are run together."""

    wanted: tuple[TaskSamples, ...]
    subject: EvaluatedModel
    protocol: EvalProtocol
    contenders: tuple[Contender, ...]
    batch_size: int = 1

    def cells(self) -> dict[EvalCell, TaskSamples]:
        """All cells in display order, each with its task and samples."""
        return {
            cell: each
            for each in self.wanted
            for cell in each.cells(self.subject, self.protocol, self.contenders)
        }

    @property
    def total(self) -> int:
        """Number of samples over all cells."""
        return sum(len(each.samples) for each in self.cells().values())

    def jobs(self, done: Mapping[tuple[EvalCell, int], str]) -> Iterator[EvalJob]:
        """Jobs still to run: a batch of samples, with all methods and budgets that they lack.

        `done` maps cell and number of finished samples to their digests. Raises KvfoldError if a
        finished sample had another text.
        """
        for each in self.wanted:
            cells = each.cells(self.subject, self.protocol, self.contenders)
            for index, sample in enumerate(each.samples):
                text = sample_digest(sample)
                for cell in cells:
                    if done.get((cell, index), text) != text:
                        raise KvfoldError(
                            f"sample {index} of {cell.task} is not the one that was evaluated "
                            "before: the data, or how it is drawn, has changed. Choose another "
                            "--out"
                        )
            yield from self._batches(each, cells, done)

    def _batches(
        self, each: TaskSamples, cells: Sequence[EvalCell], done: Mapping[tuple[EvalCell, int], str]
    ) -> Iterator[EvalJob]:
        """Jobs of one task: samples that lack the same cells, `batch_size` at a time.

        Cells that cannot share a reading, or are many, get jobs of their own, for other workers.
        """
        lacking = grouped(
            (tuple(cell for cell in cells if (cell, index) not in done), (index, sample))
            for index, sample in enumerate(each.samples)
        )
        size = self.batch_size if each.in_batches else 1
        for missing, samples in lacking.items():
            groups = [
                part
                for alike in each.reading_together(missing)
                for part in _pieces(alike, max(MOST_RESULTS // size, 1))
            ]
            for batch in _pieces(samples, size):
                yield from (EvalJob(dict(batch), group) for group in groups)


def _pieces(items: Sequence[T], most: int) -> list[tuple[T, ...]]:
    """The items in order, at most so many together."""
    return [tuple(items[start : start + most]) for start in range(0, len(items), most)]
