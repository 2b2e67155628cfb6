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
    a module-level function. `given_up(job, reason)` returns the result of a job that killed its
    worker `TRIES` times. `parts(job)` are smaller jobs to try first; none if it is the smallest.
    `loading` holds the options the model is loaded with, `imports` the
    modules that register methods; every worker imports them.
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
        """The result of the worker's job; raises WorkerDied."""

    def shutdown(self, idle: Sequence[W], busy: Sequence[W]) -> None:
        """Ends all workers; jobs still running are lost."""


def in_parallel(spec: WorkerSpec[J, R], executor: Executor[W]) -> RunJobs[J, R]:
    """Concurrent execution; the job of a worker that dies is retried, `TRIES` attempts in all.

    Then its parts are tried, if it has any.
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
                    yield result
        finally:
            executor.shutdown(idle, list(busy))

    return run


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
