# SPDX-License-Identifier: Apache-2.0
"""Evaluation jobs: a batch of samples, and the methods and budgets to run on it, for a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.budget import Budget
from kvfold.cache.cache import CompressedCache
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import FULL, TRUNCATED, EvalCell
from kvfold.eval.run.outcome import BatchOutcome, attempt
from kvfold.eval.run.prompt import SamplePrompt
from kvfold.eval.run.question_agnostic import run_question_agnostic
from kvfold.eval.run.question_aware import run_question_aware
from kvfold.eval.run.read_files import check_unchanged
from kvfold.eval.run.sample_result import SampleOutcome, SampleResult, sample_digest
from kvfold.eval.run.streaming import run_streaming
from kvfold.eval.tasks import Task, TaskSample, UnreadableSample, tasks
from kvfold.evidence.grouped import grouped
from kvfold.generation.reading import read_turn
from kvfold.jobs.executor import WorkerSpec, told
from kvfold.loading import Loading
from kvfold.measure.machine import MachineSetup, commit
from kvfold.measure.peak import allocated, peak_above

# Runs cells of one task on a batch of samples
Run = Callable[
    [PreTrainedModel, Sequence[SamplePrompt], Sequence[EvalCell], Task],
    Iterator[tuple[EvalCell, BatchOutcome]],
]


@dataclass(frozen=True)
class EvalJob:
    """Samples of one task by their number, and cells that differ in method and budget only."""

    samples: Mapping[int, TaskSample | UnreadableSample]
    cells: tuple[EvalCell, ...]

    def line(
        self, cell: EvalCell, index: int, outcome: SampleOutcome | None, error: str | None = None
    ) -> SampleResult:
        """Line of the samples file; `error` is the reason if there is no outcome."""
        sample = self.samples[index]
        return SampleResult(
            cell=cell,
            index=index,
            text=sample_digest(sample),
            outcome=outcome,
            error=error,
            metadata=dict(sample.metadata) if isinstance(sample, TaskSample) else {},
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=_commit(),
            setup=_setup(),
        )

    def errors(self, why: str) -> list[SampleResult]:
        """Error lines of all samples in all cells."""
        return [self.line(cell, index, None, why) for cell in self.cells for index in self.samples]

    def parts(self) -> list[EvalJob]:
        """Smaller jobs: one per sample, or else one per cell; none of a single cell."""
        if len(self.samples) > 1:
            return [replace(self, samples={i: sample}) for i, sample in self.samples.items()]
        return [replace(self, cells=(cell,)) for cell in self.cells if len(self.cells) > 1]

    def without(self, done: Set[tuple[EvalCell, int]]) -> list[EvalJob]:
        """Jobs without these samples of cells; cells that lack the same samples stay together."""
        missing = grouped(
            (tuple(i for i in self.samples if (cell, i) not in done), cell) for cell in self.cells
        )
        return [
            EvalJob({i: self.samples[i] for i in numbers}, tuple(cells))
            for numbers, cells in missing.items()
            if numbers
        ]


def run_job(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: EvalJob
) -> Iterator[list[SampleResult]]:
    """One line per cell and sample of the job, cell by cell; exceptions are told in `error`.

    What fails together is run again in smaller parts, so that the error of one sample, or of one
    cell, does not fail the others.
    """
    (first, *more), alone = job.samples.values(), len(job.samples) == len(job.cells) == 1
    if isinstance(first, UnreadableSample) and not more:
        yield job.errors(f"{first.where}: {first.why}")
        return
    before, left, again = allocated(model.device), list(job.cells), list[EvalJob]()
    try:
        for cell, outcome in _outcomes(model, tokenizer, list(job.samples.values()), job.cells):
            left.remove(cell)
            of_cell = replace(job, cells=(cell,))
            if isinstance(outcome, Exception):
                if len(job.samples) == 1:
                    yield of_cell.errors(told(outcome))
                else:
                    again.append(of_cell)
                continue
            if alone and before is not None:
                outcome = [_with_peak(model, each, before) for each in outcome]
            yield [job.line(cell, i, each) for i, each in zip(job.samples, outcome, strict=True)]
    except Exception as problem:
        if alone:
            yield job.errors(told(problem))
            return
        if left:
            again.append(replace(job, cells=tuple(left)))
    # Only now: what failed may have run out of memory, and its batch is freed.
    for failed in again:
        yield from _in_parts(model, tokenizer, failed)


def _in_parts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: EvalJob
) -> Iterator[list[SampleResult]]:
    """Lines of the job's parts, each run by itself."""
    for part in job.parts() or [job]:
        yield from run_job(model, tokenizer, part)


def worker_spec(
    name: str, loading: Loading | None = None
) -> WorkerSpec[EvalJob, list[SampleResult]]:
    """Spec of workers that evaluate with the model `name`."""
    return WorkerSpec(name, run_job, EvalJob.errors, EvalJob.parts, _left, loading or Loading())


def _left(job: EvalJob, results: Sequence[list[SampleResult]]) -> list[EvalJob]:
    """Jobs of what `results` lack."""
    return job.without({(line.cell, line.index) for lines in results for line in lines})


def _outcomes(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[TaskSample | UnreadableSample],
    cells: tuple[EvalCell, ...],
) -> Iterator[tuple[EvalCell, BatchOutcome]]:
    """Outcomes of cells that differ in method and budget only, by the task's phase and protocol.

    Raises KvfoldError for samples that cannot be read, or are too long, and for changed files.
    """
    for cell in cells:
        check_unchanged(cell)
    first = cells[0]
    task, limit = tasks()[first.task], first.protocol.answer_tokens
    prompts = [_prompt(sample, tokenizer, limit, task) for sample in samples]
    if task.phase == "stream":
        for cell in cells:
            yield cell, attempt(lambda: run_streaming(model, prompts, cell))  # noqa: B023
        return
    prompts = [prompt.within(first.protocol.max_length, task.truncation) for prompt in prompts]
    aware = first.protocol.question_aware or task.phase == "decode"
    run = run_question_aware if aware else run_question_agnostic
    for cell in (cell for cell in cells if cell.method == TRUNCATED):
        yield cell, attempt(lambda: _truncated(model, prompts, cell, task, run, aware))  # noqa: B023
    whole = [cell for cell in cells if cell.method != TRUNCATED]
    if whole:
        yield from run(model, prompts, whole, task)


def _prompt(
    sample: TaskSample | UnreadableSample,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    task: Task,
) -> SamplePrompt:
    """A sample's prompt, with answers of at most `limit` tokens.

    Raises KvfoldError if the sample could not be read.
    """
    if isinstance(sample, UnreadableSample):
        raise KvfoldError(f"{sample.where}: {sample.why}")
    limited = sample.with_answers_within(limit, longer=task.phase == "decode")
    # A perplexity's first token needs one before it, as in lm-evaluation-harness.
    return SamplePrompt.of(limited, tokenizer, always_bos=task.by_likelihood)


def _truncated(
    model: PreTrainedModel,
    prompts: Sequence[SamplePrompt],
    cell: EvalCell,
    task: Task,
    run: Run,
    aware: bool,
) -> list[SampleOutcome]:
    """Outcomes of a full cache on contexts truncated to the cell's budget."""
    shorter = [each.truncated(_context_room(model, each, cell, aware)) for each in prompts]
    ((_, outcomes),) = run(model, shorter, [cell.reference], task)
    if isinstance(outcomes, Exception):
        raise outcomes
    return [_as_whole_context(*each) for each in zip(prompts, shorter, outcomes, strict=True)]


def _context_room(model: PreTrainedModel, prompt: SamplePrompt, cell: EvalCell, aware: bool) -> int:
    """Context tokens that fit into the cell's budget; if `aware`, next to the question's tokens."""
    assert cell.budget is not None
    asked = prompt.tokens_after()[0] if aware else 0
    budget = Budget.of(cell.budget)
    if budget.kind == "bytes":
        cache = CompressedCache(model, FULL)
        read_turn(model, cache, prompt.ids[:, :1].to(model.device))
        return int(budget.amount) // cache.stats().nbytes_full - asked
    return budget.per_layer(prompt.ids.shape[1] + asked, 1, 1, 1, 1) - asked


def _as_whole_context(
    whole: SamplePrompt, shorter: SamplePrompt, outcome: SampleOutcome
) -> SampleOutcome:
    """A full cache's outcome on the `shorter` prompt, with sizes relative to the `whole` one."""
    held, left_out = outcome.held, shorter.left_out - whole.left_out
    longer = (held.seen + left_out) / held.seen
    update = {
        "seen": held.seen + left_out,
        "kept": held.kept / longer,
        "kept_per_layer": tuple(kept / longer for kept in held.kept_per_layer),
        "nbytes_full": round(held.nbytes_full * longer),
    }
    lengths = {"tokens": whole.tokens, "left_out": whole.left_out}
    return outcome.model_copy(update=lengths | {"held": held.model_copy(update=update)})


def _with_peak(model: PreTrainedModel, outcome: SampleOutcome, before: int) -> SampleOutcome:
    held = outcome.held.model_copy(update={"peak_bytes": peak_above(model.device, before)})
    return outcome.model_copy(update={"held": held})


_setup, _commit = cache(MachineSetup.here), cache(commit)
