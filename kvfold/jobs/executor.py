# SPDX-License-Identifier: Apache-2.0
"""What workers are given to do, and what happens to the job of one that dies."""

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

# A job that has taken so many workers with it is not tried again.
TRIES = 2
GIVEN_UP = f"its worker died {TRIES} times while it ran, perhaps for want of memory"

J = TypeVar("J")
R = TypeVar("R")
W = TypeVar("W")

# Yields what comes of each job as it is done, in any order.
Workers = Callable[[Iterable[J]], Iterator[R]]


@dataclass(frozen=True)
class Work(Generic[J, R]):
    """What is done with a job, by the model `name`, which every worker loads in the same way.

    `run` takes model, tokenizer and job; other processes find it by its module. `given_up` is what
    comes of a job that its workers did not survive: it takes the job, and why. `imports` are the
    modules that register methods of jobs.
    """

    name: str
    run: Callable[[PreTrainedModel, PreTrainedTokenizerBase, J], R]
    given_up: Callable[[J, str], R]
    loading: Loading = field(default_factory=Loading)
    imports: tuple[str, ...] = field(default_factory=imported_methods)


def here(
    work: Work[J, R], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Workers[J, R]:
    """One job after the other, in this process."""
    return lambda jobs: (work.run(model, tokenizer, job) for job in jobs)


class Died(Exception):
    """A worker is gone, and the job that it had is not done."""


class Crew(Protocol, Generic[W]):
    """`count` workers at a time, of which each does one job after the other."""

    count: int

    def hire(self) -> W:
        """A new worker."""

    def give(self, worker: W, job: Any) -> None:
        """Hands a job to an idle worker."""

    def ready(self, busy: Sequence[W]) -> list[W]:
        """Those of the busy ones that are done, or gone: at least one."""

    def take(self, worker: W) -> Any:
        """What came of a worker's job; raises Died."""

    def dismiss(self, idle: Sequence[W], busy: Sequence[W]) -> None:
        """Ends all workers, whatever they are doing."""


def together(work: Work[J, R], crew: Crew[W]) -> Workers[J, R]:
    """Several jobs at a time; that of a worker that dies is run again, `TRIES` times in all."""

    def run(jobs: Iterable[J]) -> Iterator[R]:
        waiting = ((job, 1) for job in jobs)
        lost: list[tuple[J, int]] = []
        idle: list[W] = []
        busy: dict[W, tuple[J, int]] = {}
        try:
            while True:
                while len(busy) < crew.count and (
                    given := lost.pop() if lost else next(waiting, None)
                ):
                    worker = idle.pop() if idle else crew.hire()
                    crew.give(worker, given[0])
                    busy[worker] = given
                if not busy:
                    return
                for worker in crew.ready(list(busy)):
                    job, tried = busy.pop(worker)
                    try:
                        made = crew.take(worker)
                    except Died:
                        if tried < TRIES:
                            lost.append((job, tried + 1))
                            continue
                        made = work.given_up(job, GIVEN_UP)
                    else:
                        idle.append(worker)
                    yield made
        finally:
            crew.dismiss(idle, list(busy))

    return run


def start(work: Work[Any, Any], count: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of one of `count` workers, which share the cores unless the environment does."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    # The bar at the terminal is that of the jobs.
    disable_progress_bar()
    for module in work.imports:
        import_methods(module)
    return load(work.name, work.loading)
