# SPDX-License-Identifier: Apache-2.0
"""Executors: workers that run jobs with a loaded model, and the retry when a worker dies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from kvfold.errors import KvfoldError
from kvfold.loading import Loading, load
from kvfold.methods.registry import import_methods, imported_methods

# Attempts per job: one that has killed this many workers is reported as failed.
TRIES = 2
GIVEN_UP = f"its worker died {TRIES} times while it ran, perhaps for want of memory"

J = TypeVar("J")
R = TypeVar("R")
W = TypeVar("W")

# Maps jobs to their results, yielded as they come, in any order.
RunJobs = Callable[[Iterable[J]], Iterator[R]]


def _none(job: Any) -> tuple[()]:
    """No smaller jobs."""
    return ()


def _one_result(job: J, results: Sequence[Any]) -> Sequence[J]:
    """The job, unless its only result has come."""
    return () if results else (job,)


@dataclass(frozen=True)
class WorkerSpec(Generic[J, R]):
    """Function that workers apply to every job, and the model `name` that each of them loads.

    `run(model, tokenizer, job)` yields the job's results as they come; it is pickled by reference,
    so it must be a module-level function. `left(job, results)` are the jobs that remain of one that
    ended after these results. What has killed `TRIES` workers is replaced by its `parts(job)`,
    which are smaller jobs. `given_up(job, reason)` returns the result of a job that raised, and of
    one that has killed so many workers and has no parts. `loading` holds the options the model is
    loaded with, `imports` the modules that register methods; every worker imports them.
    """

    name: str
    run: Callable[[PreTrainedModel, PreTrainedTokenizerBase, J], Iterable[R]]
    given_up: Callable[[J, str], R]
    parts: Callable[[J], Sequence[J]] = _none
    left: Callable[[J, Sequence[R]], Sequence[J]] = _one_result
    loading: Loading = field(default_factory=Loading)
    imports: tuple[str, ...] = field(default_factory=imported_methods)


def here(
    spec: WorkerSpec[J, R], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> RunJobs[J, R]:
    """Sequential execution in this process, with a model that is loaded already."""
    return lambda jobs: (result for job in jobs for result in spec.run(model, tokenizer, job))


class WorkerDied(Exception):
    """A worker ended before it had sent all results of its job."""


@dataclass(frozen=True)
class JobDone:
    """A worker's message after the last result of its job."""


@dataclass(frozen=True)
class JobFailed:
    """A worker's message after the results of a job that raised, as `why` tells."""

    why: str


@dataclass(frozen=True)
class ModelFailed:
    """A worker's message in place of results: it has no model, as `why` tells."""

    why: str


def told(problem: BaseException) -> str:
    """First line of an exception's message, after its type unless it is a KvfoldError."""
    said = str(problem).partition("\n")[0]
    return said if isinstance(problem, KvfoldError) else f"{type(problem).__name__}: {said}"


class Executor(Protocol, Generic[W]):
    """At most `count` workers at a time; each runs one job after another."""

    count: int

    def start_worker(self) -> W:
        """A new idle worker."""

    def submit(self, worker: W, job: Any) -> None:
        """Sends a job to an idle worker."""

    def wait(self, busy: Sequence[W]) -> list[W]:
        """Blocks until at least one busy worker has sent something or is dead; returns these."""

    def result(self, worker: W) -> Any:
        """The next result of the worker's job, JobDone, JobFailed or ModelFailed.

        Raises WorkerDied.
        """

    def shutdown(self, idle: Sequence[W], busy: Sequence[W]) -> None:
        """Ends all workers; jobs still running are lost."""


@dataclass
class _Attempt(Generic[J, R]):
    """A job at a worker, for the `tried`th time, and the results that have come."""

    job: J
    tried: int = 1
    results: list[R] = field(default_factory=list)


def in_parallel(spec: WorkerSpec[J, R], executor: Executor[W]) -> RunJobs[J, R]:
    """Concurrent execution; what is left of the job of a worker that dies is tried again.

    After `TRIES` attempts its parts are tried, if it has any. A job that raises is given up at
    once, as it would raise again. Raises KvfoldError if a worker cannot load the model.
    """

    def run(jobs: Iterable[J]) -> Iterator[R]:
        waiting = (_Attempt[J, R](job) for job in jobs)
        lost: list[_Attempt[J, R]] = []
        idle: list[W] = []
        busy: dict[W, _Attempt[J, R]] = {}
        try:
            while True:
                begun: dict[W, _Attempt[J, R]] = {}
                while len(busy) < executor.count and (
                    attempt := lost.pop() if lost else next(waiting, None)
                ):
                    worker = idle.pop() if idle else executor.start_worker()
                    busy[worker] = begun[worker] = attempt
                # A large job is taken only when its worker has loaded: by then all others load too.
                for worker, attempt in begun.items():
                    executor.submit(worker, attempt.job)
                if not busy:
                    return
                for worker in executor.wait(list(busy)):
                    attempt = busy[worker]
                    try:
                        result = executor.result(worker)
                    except WorkerDied:
                        again, failed = _after_death(spec, busy.pop(worker))
                        lost += again
                        yield from failed
                        continue
                    if isinstance(result, ModelFailed):
                        raise KvfoldError(f"no model in a worker: {result.why}")
                    if isinstance(result, JobDone | JobFailed):
                        del busy[worker]
                        idle.append(worker)
                        if isinstance(result, JobFailed):
                            for job in spec.left(attempt.job, attempt.results):
                                yield spec.given_up(job, result.why)
                        continue
                    attempt.results.append(result)
                    yield result
        finally:
            executor.shutdown(idle, list(busy))

    return run


def _after_death(
    spec: WorkerSpec[J, R], of: _Attempt[J, R]
) -> tuple[list[_Attempt[J, R]], list[R]]:
    """Units to try after a worker died, and the results of those that are given up."""
    again, failed = list[_Attempt[J, R]](), list[R]()
    for job in spec.left(of.job, of.results):
        if of.tried < TRIES:
            again.append(_Attempt(job, of.tried + 1))
        elif parts := spec.parts(job):
            again += map(_Attempt, parts)
        else:
            failed.append(spec.given_up(job, GIVEN_UP))
    return again, failed


class ModelWorker:
    """The loaded model of a worker, which runs jobs; it returns failures, and never raises.

    An exception that left the worker would end it, or come without its type to the parent.
    """

    def __init__(self, spec: WorkerSpec[Any, Any], count: int, number: int = 0) -> None:
        """Loads the model in one of `count` workers, which is the `number`th on its machine."""
        self.spec = spec
        self.loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase] | ModelFailed
        try:
            self.loaded = load_in_worker(spec, count, number)
        except Exception as problem:
            self.loaded = ModelFailed(told(problem))

    def run(self, job: Any) -> Iterator[Any]:
        """The job's results and then JobDone or JobFailed, or else ModelFailed."""
        if isinstance(self.loaded, ModelFailed):
            yield self.loaded
            return
        try:
            yield from self.spec.run(*self.loaded, job)
        except Exception as problem:
            yield JobFailed(told(problem))
        else:
            yield JobDone()


def load_in_worker(
    spec: WorkerSpec[Any, Any], count: int, number: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer, loaded in the `number`th of `count` workers, after `spec`'s imports.

    The cores are divided by `count`, unless OMP_NUM_THREADS is set.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    # The terminal shows one progress bar, that of the jobs.
    disable_progress_bar()
    for module in spec.imports:
        import_methods(module)
    return load(spec.name, spec.loading.of_worker(number))
