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

# Maps jobs to their results, yielded as they are done, in any order.
RunJobs = Callable[[Iterable[J]], Iterator[R]]


def _none(job: Any) -> tuple[()]:
    """No smaller jobs."""
    return ()


@dataclass(frozen=True)
class WorkerSpec(Generic[J, R]):
    """Function that workers apply to every job, and the model `name` that each of them loads.

    `run(model, tokenizer, job)` returns the job's result; it is pickled by reference, so it must be
    a module-level function. A job that has killed `TRIES` workers is replaced by its `parts(job)`,
    which are smaller jobs. `given_up(job, reason)` returns the result of a job that raised, and of
    one that has killed so many workers and has no parts. `loading` holds the options the model is
    loaded with, `imports` the modules that register methods; every worker imports them.
    """

    name: str
    run: Callable[[PreTrainedModel, PreTrainedTokenizerBase, J], R]
    given_up: Callable[[J, str], R]
    parts: Callable[[J], Sequence[J]] = _none
    loading: Loading = field(default_factory=Loading)
    imports: tuple[str, ...] = field(default_factory=imported_methods)


def here(
    spec: WorkerSpec[J, R], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> RunJobs[J, R]:
    """Sequential execution in this process, with a model that is loaded already."""
    return lambda jobs: (spec.run(model, tokenizer, job) for job in jobs)


class WorkerDied(Exception):
    """A worker ended before it returned the result of its job."""


@dataclass(frozen=True)
class JobFailed:
    """What a worker sends in place of a result: its job raised, as `why` tells."""

    why: str


@dataclass(frozen=True)
class ModelFailed:
    """What a worker sends in place of a result: it has no model, as `why` tells."""

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
        """Blocks until at least one busy worker is done or dead; returns all of these."""

    def result(self, worker: W) -> Any:
        """The result of the worker's job, JobFailed or ModelFailed; raises WorkerDied."""

    def shutdown(self, idle: Sequence[W], busy: Sequence[W]) -> None:
        """Ends all workers; jobs still running are lost."""


def in_parallel(spec: WorkerSpec[J, R], executor: Executor[W]) -> RunJobs[J, R]:
    """Concurrent execution; the job of a worker that dies is retried, `TRIES` attempts in all.

    Then its parts are tried, if it has any. A job that raises is given up at once, as it would
    raise again. Raises KvfoldError if a worker cannot load the model.
    """

    def run(jobs: Iterable[J]) -> Iterator[R]:
        waiting = ((job, 1) for job in jobs)
        lost: list[tuple[J, int]] = []
        idle: list[W] = []
        busy: dict[W, tuple[J, int]] = {}
        try:
            while True:
                while len(busy) < executor.count and (
                    attempt := lost.pop() if lost else next(waiting, None)
                ):
                    worker = idle.pop() if idle else executor.start_worker()
                    executor.submit(worker, attempt[0])
                    busy[worker] = attempt
                if not busy:
                    return
                for worker in executor.wait(list(busy)):
                    job, tried = busy.pop(worker)
                    try:
                        result = executor.result(worker)
                    except WorkerDied:
                        if tried < TRIES:
                            lost.append((job, tried + 1))
                            continue
                        if parts := spec.parts(job):
                            lost += [(part, 1) for part in parts]
                            continue
                        result = spec.given_up(job, GIVEN_UP)
                    else:
                        idle.append(worker)
                    if isinstance(result, ModelFailed):
                        raise KvfoldError(f"no model in a worker: {result.why}")
                    if isinstance(result, JobFailed):
                        result = spec.given_up(job, result.why)
                    yield result
        finally:
            executor.shutdown(idle, list(busy))

    return run


class ModelWorker:
    """The loaded model of a worker, which runs jobs; it returns failures, and never raises.

    An exception that left the worker would end it, or come without its type to the parent.
    """

    def __init__(self, spec: WorkerSpec[Any, Any], count: int) -> None:
        """Loads the model in one of `count` workers."""
        self.spec = spec
        self.loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase] | ModelFailed
        try:
            self.loaded = load_in_worker(spec, count)
        except Exception as problem:
            self.loaded = ModelFailed(told(problem))

    def run(self, job: Any) -> Any:
        """The job's result, JobFailed or ModelFailed."""
        if isinstance(self.loaded, ModelFailed):
            return self.loaded
        try:
            return self.spec.run(*self.loaded, job)
        except Exception as problem:
            return JobFailed(told(problem))


def load_in_worker(
    spec: WorkerSpec[Any, Any], count: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer, loaded in one of `count` workers, after the imports of `spec`.

    The cores are divided by `count`, unless OMP_NUM_THREADS is set.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    # The terminal shows one progress bar, that of the jobs.
    disable_progress_bar()
    for module in spec.imports:
        import_methods(module)
    return load(spec.name, spec.loading)
