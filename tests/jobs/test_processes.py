# SPDX-License-Identifier: Apache-2.0
"""Jobs in processes: a killed worker loses nothing, one that always dies is an error."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvfold.eval.run.job import EvalJob, run_job, worker_spec
from kvfold.eval.run.sample_result import SampleResult
from kvfold.jobs import executor as workers
from kvfold.jobs.executor import WorkerDied, in_parallel
from kvfold.jobs.processes import processes
from tests.helpers.evaluation import Setting, by_itself, by_number, jobs, record


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting.new()


@pytest.fixture(scope="module")
def folder(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, for other processes to load."""
    path = tmp_path_factory.mktemp("model")
    setting.plain.save_pretrained(path)
    setting.tokenizer.save_pretrained(path)
    return path


class Deadly(str):
    """A text that no process survives reading."""

    def __reduce__(self) -> Any:
        return signal.raise_signal, (signal.SIGKILL,)


@pytest.mark.slow
def test_processes_that_are_killed_lose_nothing(setting, folder):
    todo = jobs(setting)
    alone = [s for each in by_itself(setting)(todo) for s in each]
    killer = replace(todo[0], samples={0: record(context=Deadly("text"))}, cells=todo[0].cells[:1])
    running = processes(worker_spec(str(folder)), 2)([todo[0], killer, *todo[1:]])
    found = list(next(running))
    # Busy or idle: which of the two it is is not known.
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    found += [sample for samples in running for sample in samples]
    died = [sample for sample in found if sample.error is not None]
    assert [(s.index, s.cell.method) for s in died] == [(0, "full")]
    assert "its worker died 2 times" in died[0].error
    assert by_number(s for s in found if s.error is None) == by_number(alone)
    assert multiprocessing.active_children() == []


class Fragile:
    """Executor in this process; a worker dies `fatal[index]` times on the job of that index."""

    def __init__(self, setting: Setting, count: int, fatal: dict[int, int]) -> None:
        self.setting, self.count, self.fatal = setting, count, dict(fatal)
        self.at_work: dict[int, EvalJob] = {}
        self.started = self.ended = 0

    def start_worker(self) -> int:
        self.started += 1
        assert len(self.at_work) < self.count
        return self.started

    def submit(self, worker: int, job: EvalJob) -> None:
        assert worker not in self.at_work
        self.at_work[worker] = job

    def wait(self, busy: Sequence[int]) -> list[int]:
        assert set(busy) == set(self.at_work)
        return [max(busy)]

    def result(self, worker: int) -> list[SampleResult]:
        job = self.at_work.pop(worker)
        (index,) = job.samples
        if self.fatal.get(index, 0):
            self.fatal[index] -= 1
            raise WorkerDied
        return run_job(self.setting.model, self.setting.tokenizer, job)

    def shutdown(self, idle: Sequence[int], busy: Sequence[int]) -> None:
        self.ended = len(idle) + len(busy)


def test_a_job_whose_worker_always_dies_is_an_error_and_the_others_are_done(setting):
    todo = jobs(setting, 12)
    executor = Fragile(setting, 2, {1: 1, 3: 1000})
    results = in_parallel(worker_spec("tiny"), executor)(iter(todo))
    found = [sample for samples in results for sample in samples]
    keys = [(sample.cell, sample.index) for sample in found]
    assert len(keys) == len(set(keys)) == sum(len(job.cells) for job in todo)
    failed = [sample for sample in found if sample.error is not None]
    assert {sample.index for sample in failed} == {3}
    assert len(failed) == len(todo[3].cells) > 1
    assert all(f"died {workers.TRIES} times" in sample.error for sample in failed)
    # One for each that died, in the job and in its parts, and none more than there are places.
    deaths = 1 + workers.TRIES * (1 + len(todo[3].cells))
    assert executor.started == 2 + deaths and executor.ended == 2


def test_a_cell_that_kills_its_worker_leaves_the_others_of_its_job(setting):
    todo = jobs(setting, 2)
    deadly = todo[1].cells[-1]

    class Choosy(Fragile):
        def result(self, worker: int) -> Any:
            if deadly in self.at_work[worker].cells and 1 in self.at_work[worker].samples:
                del self.at_work[worker]
                raise WorkerDied
            return super().result(worker)

    results = in_parallel(worker_spec("tiny"), Choosy(setting, 2, {}))(iter(todo))
    found = [sample for samples in results for sample in samples]
    assert len(found) == sum(len(job.cells) for job in todo)
    assert [(line.index, line.cell) for line in found if line.error] == [(1, deadly)]


def test_workers_are_shut_down_when_the_run_is_stopped(setting):
    executor = Fragile(setting, 3, {})
    running: Iterator[list[SampleResult]] = in_parallel(worker_spec("tiny"), executor)(
        jobs(setting)
    )
    next(running)
    running.close()
    assert executor.ended == 3
