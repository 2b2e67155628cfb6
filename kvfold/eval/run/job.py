# SPDX-License-Identifier: Apache-2.0
"""One sample and one method at one or several budgets: what a worker runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.bench.machine import Setup, commit
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import CUT, Cell
from kvfold.eval.run.prompt import Prompt
from kvfold.eval.run.question_agnostic import apart
from kvfold.eval.run.question_aware import together
from kvfold.eval.run.sample import Outcome, Sample, digest
from kvfold.eval.run.streaming import streamed
from kvfold.eval.run.truncated import as_of, room
from kvfold.eval.tasks import Record, Task, Unreadable, tasks
from kvfold.jobs.executor import Work
from kvfold.loading import Loading


@dataclass(frozen=True)
class Job:
    """The sample of a number, and cells that differ in their budget only."""

    index: int
    sample: Record | Unreadable
    cells: tuple[Cell, ...]

    def line(self, cell: Cell, outcome: Outcome | None, error: str | None = None) -> Sample:
        """What is written down of one cell."""
        return Sample(
            cell=cell,
            index=self.index,
            text=digest(self.sample),
            outcome=outcome,
            error=error,
            metadata=dict(self.sample.metadata) if isinstance(self.sample, Record) else {},
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=_commit(),
            setup=_setup(),
        )


def run(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: Job) -> list[Sample]:
    """The job's samples, one for each cell; what goes wrong is said in them.

    An error of one cell must not be the others', so where one occurs each runs by itself.
    """
    if isinstance(job.sample, Unreadable):
        said = f"{job.sample.where}: {job.sample.why}"
        return [job.line(cell, None, said) for cell in job.cells]
    alone, before = len(job.cells) == 1, _reset_peak(model.device)
    try:
        outcomes = dict(_outcomes(model, tokenizer, job.sample, job.cells))
    except Exception as problem:
        if alone:
            return [job.line(job.cells[0], None, _words(problem))]
        each = [run(model, tokenizer, replace(job, cells=(cell,))) for cell in job.cells]
        return [sample for samples in each for sample in samples]
    if alone and before is not None:
        outcomes = {cell: _with_peak(model, outcome, before) for cell, outcome in outcomes.items()}
    return [job.line(cell, outcomes[cell]) for cell in job.cells]


def work(name: str, loading: Loading | None = None) -> Work[Job, list[Sample]]:
    """What workers with the model `name` do with jobs."""
    return Work(name, run, _given_up, loading or Loading())


def _given_up(job: Job, why: str) -> list[Sample]:
    return [job.line(cell, None, why) for cell in job.cells]


def _outcomes(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    record: Record,
    cells: tuple[Cell, ...],
) -> Iterator[tuple[Cell, Outcome]]:
    first = cells[0]
    task, prompt = tasks()[first.task], Prompt.of(record, tokenizer)
    if task.phase == "stream":
        yield from ((cell, streamed(model, prompt, cell)) for cell in cells)
        return
    prompt = prompt.within(first.protocol.max_length, task.truncation)
    aware = first.protocol.question_aware or task.phase == "decode"
    if first.method == CUT:
        for cell in cells:
            shorter = prompt.cut(room(model, prompt, cell, aware))
            yield cell, as_of(prompt, shorter, _one(model, shorter, cell.reference, task, aware))
    elif aware:
        yield from ((cell, together(model, prompt, cell, task)) for cell in cells)
    else:
        yield from apart(model, prompt, cells, task)


def _one(model: PreTrainedModel, prompt: Prompt, cell: Cell, task: Task, aware: bool) -> Outcome:
    if aware:
        return together(model, prompt, cell, task)
    return next(apart(model, prompt, [cell], task))[1]


def _with_peak(model: PreTrainedModel, outcome: Outcome, before: int) -> Outcome:
    peak = torch.cuda.max_memory_allocated(model.device) - before
    held = outcome.held.model_copy(update={"peak_bytes": peak})
    return outcome.model_copy(update={"held": held})


def _reset_peak(device: torch.device) -> int | None:
    """Starts to note the most memory allocated; returns what is now, None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _words(problem: Exception) -> str:
    """What went wrong; other than a refusal, with its kind."""
    said = str(problem).partition("\n")[0]
    return said if isinstance(problem, KvfoldError) else f"{type(problem).__name__}: {said}"


@cache
def _setup() -> Setup:
    return Setup.here()


@cache
def _commit() -> str | None:
    return commit()
