# SPDX-License-Identifier: Apache-2.0
"""Evaluation jobs: one sample and one method at one or several budgets, run by a worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.bench.machine import MachineSetup, commit
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import TRUNCATED, EvalCell
from kvfold.eval.run.prompt import SamplePrompt
from kvfold.eval.run.question_agnostic import run_question_agnostic
from kvfold.eval.run.question_aware import run_question_aware
from kvfold.eval.run.sample_result import SampleOutcome, SampleResult, sample_digest
from kvfold.eval.run.streaming import run_streaming
from kvfold.eval.run.truncated import as_whole_context, context_room
from kvfold.eval.tasks import Task, TaskSample, UnreadableSample, tasks
from kvfold.jobs.executor import WorkerSpec
from kvfold.loading import Loading


@dataclass(frozen=True)
class EvalJob:
    """The sample with number `index`, and cells that differ only in their budget."""

    index: int
    sample: TaskSample | UnreadableSample
    cells: tuple[EvalCell, ...]

    def line(
        self, cell: EvalCell, outcome: SampleOutcome | None, error: str | None = None
    ) -> SampleResult:
        """Line of the samples file for one cell; `error` is the reason if there is no outcome."""
        return SampleResult(
            cell=cell,
            index=self.index,
            text=sample_digest(self.sample),
            outcome=outcome,
            error=error,
            metadata=dict(self.sample.metadata) if isinstance(self.sample, TaskSample) else {},
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=_commit(),
            setup=_setup(),
        )


def run_job(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: EvalJob
) -> list[SampleResult]:
    """One line per cell of the job; exceptions are caught and written into `error`.

    If a job of several cells fails, each cell is rerun alone, so that one budget's error does not
    fail the others.
    """
    if isinstance(job.sample, UnreadableSample):
        said = f"{job.sample.where}: {job.sample.why}"
        return [job.line(cell, None, said) for cell in job.cells]
    alone, before = len(job.cells) == 1, _reset_peak(model.device)
    try:
        outcomes = dict(_outcomes(model, tokenizer, job.sample, job.cells))
    except Exception as problem:
        if alone:
            return [job.line(job.cells[0], None, _message(problem))]
        each = [run_job(model, tokenizer, replace(job, cells=(cell,))) for cell in job.cells]
        return [sample for samples in each for sample in samples]
    if alone and before is not None:
        outcomes = {cell: _with_peak(model, outcome, before) for cell, outcome in outcomes.items()}
    return [job.line(cell, outcomes[cell]) for cell in job.cells]


def worker_spec(
    name: str, loading: Loading | None = None
) -> WorkerSpec[EvalJob, list[SampleResult]]:
    """Spec of workers that evaluate with the model `name`."""
    return WorkerSpec(name, run_job, _given_up, loading or Loading())


def _given_up(job: EvalJob, why: str) -> list[SampleResult]:
    """Error lines of a job whose workers died."""
    return [job.line(cell, None, why) for cell in job.cells]


def _outcomes(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sample: TaskSample,
    cells: tuple[EvalCell, ...],
) -> Iterator[tuple[EvalCell, SampleOutcome]]:
    """Outcomes of cells that differ only in their budget, by the task's phase and protocol."""
    first = cells[0]
    task, prompt = tasks()[first.task], SamplePrompt.of(sample, tokenizer)
    if task.phase == "stream":
        yield from ((cell, run_streaming(model, prompt, cell)) for cell in cells)
        return
    prompt = prompt.within(first.protocol.max_length, task.truncation)
    aware = first.protocol.question_aware or task.phase == "decode"
    if first.method == TRUNCATED:
        for cell in cells:
            shorter = prompt.truncated(context_room(model, prompt, cell, aware))
            outcome = _outcome(model, shorter, cell.reference, task, aware)
            yield cell, as_whole_context(prompt, shorter, outcome)
    elif aware:
        yield from ((cell, run_question_aware(model, prompt, cell, task)) for cell in cells)
    else:
        yield from run_question_agnostic(model, prompt, cells, task)


def _outcome(
    model: PreTrainedModel, prompt: SamplePrompt, cell: EvalCell, task: Task, aware: bool
) -> SampleOutcome:
    """Outcome of one cell, question-aware or question-agnostic."""
    if aware:
        return run_question_aware(model, prompt, cell, task)
    return next(run_question_agnostic(model, prompt, [cell], task))[1]


def _with_peak(model: PreTrainedModel, outcome: SampleOutcome, before: int) -> SampleOutcome:
    peak = torch.cuda.max_memory_allocated(model.device) - before
    held = outcome.held.model_copy(update={"peak_bytes": peak})
    return outcome.model_copy(update={"held": held})


def _reset_peak(device: torch.device) -> int | None:
    """Resets the GPU's peak counter; returns the bytes allocated now, or None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _message(problem: Exception) -> str:
    """First line of an exception's message, after its type unless it is a KvfoldError."""
    said = str(problem).partition("\n")[0]
    return said if isinstance(problem, KvfoldError) else f"{type(problem).__name__}: {said}"


@cache
def _setup() -> MachineSetup:
    return MachineSetup.here()


@cache
def _commit() -> str | None:
    return commit()
