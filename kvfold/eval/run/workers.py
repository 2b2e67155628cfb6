# SPDX-License-Identifier: Apache-2.0
"""Who runs the jobs: this process, several of this machine, or those of a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from kvfold import compat
from kvfold.cli.run import load
from kvfold.eval.run.job import Job, run
from kvfold.eval.run.sample import Sample

# Yields each job's samples as they are done, in any order.
Workers = Callable[[Iterable[Job]], Iterator[list[Sample]]]
# A job that has taken so many workers with it is not tried again.
TRIES = 2

W = TypeVar("W")


class Died(Exception):
    """A worker is gone, and the job that it had is not done."""


class Crew(Protocol, Generic[W]):
    """`count` workers at a time, of which each runs one job after the other."""

    count: int

    def hire(self) -> W:
        """A new worker."""

    def give(self, worker: W, job: Job) -> None:
        """Hands a job to an idle worker."""

    def ready(self, busy: Sequence[W]) -> list[W]:
        """Those of the busy ones that are done, or gone: at least one."""

    def take(self, worker: W) -> list[Sample]:
        """What a worker has made of its job; raises Died."""

    def dismiss(self, idle: Sequence[W], busy: Sequence[W]) -> None:
        """Ends all workers, whatever they are doing."""


def here(model: compat.PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Workers:
    """One job after the other, in this process."""
    return lambda jobs: (run(model, tokenizer, job) for job in jobs)


def together(crew: Crew[W]) -> Workers:
    """Several jobs at a time; that of a worker that dies is run again, `TRIES` times in all."""

    def work(jobs: Iterable[Job]) -> Iterator[list[Sample]]:
        waiting = ((job, 1) for job in jobs)
        lost: list[tuple[Job, int]] = []
        idle: list[W] = []
        busy: dict[W, tuple[Job, int]] = {}
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
                        samples = crew.take(worker)
                    except Died:
                        if tried < TRIES:
                            lost.append((job, tried + 1))
                            continue
                        samples = _given_up(job)
                    else:
                        idle.append(worker)
                    yield samples
        finally:
            crew.dismiss(idle, list(busy))

    return work


def start(name: str, count: int) -> tuple[compat.PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of one of `count` workers, which share the cores unless the environment does."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    # The bar at the terminal is that of the samples.
    disable_progress_bar()
    return load(name)


def _given_up(job: Job) -> list[Sample]:
    why = f"its worker died {TRIES} times while it ran, perhaps for want of memory"
    return [job.line(cell, None, why) for cell in job.cells]
