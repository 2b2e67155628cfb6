# SPDX-License-Identifier: Apache-2.0
"""Jobs in processes: a killed worker loses nothing, one that always dies is an error.

So is a job that raises, by its own words; without a model the run ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvfold
from kvfold.budget import Budget
from kvfold.errors import KvfoldError
from kvfold.eval.run.job import EvalJob, run_job, worker_spec
from kvfold.eval.run.sample_result import SampleResult
from kvfold.jobs import executor as workers
from kvfold.jobs import processes as spawned
from kvfold.jobs.compress import CompressJob, CompressOptions
from kvfold.jobs.compress import worker_spec as compressing
from kvfold.jobs.executor import JobDone, WorkerDied, WorkerSpec, here, in_parallel
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


class Unreadable(str):
    """A text that no process can read."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def echo(model: object, tokenizer: object, job: str) -> Iterator[Any]:
    """The job itself, but "raises" raises, and "lambda" makes what cannot be sent."""
    if job == "raises":
        raise ValueError("row 2 is malformed\nand more")
    if job == "refuses":
        raise KvfoldError("too long")
    yield (lambda: job) if job == "lambda" else job


def process(model: object, tokenizer: object, job: str) -> Iterator[int]:
    yield os.getpid()


def letters(model: object, tokenizer: object, job: str) -> Iterator[str]:
    """The job's letters, up to one that raises."""
    for letter in job:
        if letter == "!":
            raise ValueError(letter)
        yield letter


def letters_left(job: str, results: Sequence[str]) -> list[str]:
    return [job[len(results) :]] if len(results) < len(job) else []


def gave_up(job: str, why: str) -> tuple[str, str]:
    return job, why


@pytest.mark.whole
def test_workers_leave_interrupts_to_their_parent_from_the_start(folder, capfd):
    before, interrupted = signal.getsignal(signal.SIGINT), set[int]()

    def jobs() -> Iterator[str]:
        yield "a"
        (starting,) = multiprocessing.active_children()
        os.kill(starting.pid, signal.SIGINT)
        interrupted.add(starting.pid)
        yield "b"

    found = set(processes(WorkerSpec(str(folder), process, gave_up), 2)(jobs()))
    assert len(found) == 2 and interrupted < found
    assert "Traceback" not in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_a_job_that_raises_is_told_in_its_own_words_and_the_others_are_done(folder):
    todo = ["a", "raises", Unreadable("text"), "b", "lambda", "refuses", "c"]
    found = list(processes(WorkerSpec(str(folder), echo, gave_up), 1)(todo))
    failed = dict(each for each in found if isinstance(each, tuple))
    assert sorted(each for each in found if isinstance(each, str)) == ["a", "b", "c"]
    assert failed.keys() == {"raises", "text", "lambda", "refuses"}
    assert failed["raises"] == "ValueError: row 2 is malformed"
    assert failed["text"].startswith("ValueError: invalid literal")
    assert failed["refuses"] == "too long" and "pickle" in failed["lambda"]


def test_every_worker_has_a_number_of_its_own(monkeypatch):
    numbers = []
    monkeypatch.setattr(
        spawned, "_ProcessWorker", lambda spec, count, number: numbers.append(number)
    )
    executor = spawned._ProcessExecutor(WorkerSpec("tiny", echo, gave_up), 2)
    for _ in range(3):
        executor.start_worker()
    assert numbers == [0, 1, 2]


@pytest.mark.whole
def test_results_come_one_by_one_and_only_what_is_left_of_a_job_is_given_up(folder):
    spec = WorkerSpec(str(folder), letters, gave_up, left=letters_left)
    found = list(processes(spec, 1)(["abc", "de!f", "g"]))
    assert found == ["a", "b", "c", "d", "e", ("!f", "ValueError: !"), "g"]


@pytest.mark.whole
@pytest.mark.parametrize("jobs_of", [1, 3])
def test_a_model_that_no_worker_can_load_is_refused_once(tmp_path, jobs_of):
    running = processes(WorkerSpec(str(tmp_path / "none"), echo, gave_up), 2)(["a"] * jobs_of)
    with pytest.raises(KvfoldError, match=r"no model in a worker: cannot load '.*none'"):
        list(running)
    assert multiprocessing.active_children() == []


@pytest.mark.whole
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


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (ValueError("a row\nis malformed"), "ValueError: a row"),
        (MemoryError(), "MemoryError: "),
        (KvfoldError("too long"), "too long"),
    ],
)
def test_a_document_that_raises_leaves_the_others_of_its_batch(
    setting: Setting, tmp_path: Path, problem: Exception, why: str
) -> None:
    class Broken:
        path, codec = tmp_path / "broken.kvfold", None

        def made(self, *_: object) -> Any:
            raise problem

    options = CompressOptions(kvfold.parse("knorm"), Budget.of(8), None, "at_end", 0)
    sound = CompressJob("a text of some words, " * 4, tmp_path / "sound.kvfold", options)
    running = here(compressing("tiny"), setting.model, setting.tokenizer)
    found = list(running([Broken(), sound]))
    assert [(each.path.name, each.why) for each in found] == [
        ("broken.kvfold", why), ("sound.kvfold", None),
    ]  # fmt: skip
    assert sound.path.exists() and not Broken.path.exists()


class Fragile:
    """Executor in this process; a worker dies `fatal[index]` times on the job of that index."""

    def __init__(self, setting: Setting, count: int, fatal: dict[int, int]) -> None:
        self.setting, self.count, self.fatal = setting, count, dict(fatal)
        self.at_work: dict[int, EvalJob] = {}
        self.results: dict[int, Iterator[list[SampleResult]]] = {}
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

    def result(self, worker: int) -> list[SampleResult] | JobDone:
        job = self.at_work[worker]
        (index,) = job.samples
        if self.fatal.get(index, 0):
            self.fatal[index] -= 1
            self.ended_job(worker)
            raise WorkerDied
        results = self.results.setdefault(
            worker, run_job(self.setting.model, self.setting.tokenizer, job)
        )
        if lines := next(results, None):
            return lines
        self.ended_job(worker)
        return JobDone()

    def ended_job(self, worker: int) -> None:
        del self.at_work[worker]
        self.results.pop(worker, None)

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
                self.ended_job(worker)
                raise WorkerDied
            return super().result(worker)

    results = in_parallel(worker_spec("tiny"), Choosy(setting, 2, {}))(iter(todo))
    found = [sample for samples in results for sample in samples]
    assert len(found) == sum(len(job.cells) for job in todo)
    assert [(line.index, line.cell) for line in found if line.error] == [(1, deadly)]


def test_a_worker_that_dies_between_two_cells_repeats_none(setting):
    _, todo = jobs(setting, 2)
    given = []

    class Late(Fragile):
        def submit(self, worker: int, job: EvalJob) -> None:
            given.append(job)
            super().submit(worker, job)

        def result(self, worker: int) -> Any:
            lines = super().result(worker)
            self.fatal = {1: 1} if len(given) == 1 else {}
            return lines

    results = in_parallel(worker_spec("tiny"), Late(setting, 1, {}))([todo])
    found = [line.cell for lines in results for line in lines]
    assert len(found) == len(todo.cells) > 2 and set(found) == set(todo.cells)
    assert [set(job.cells) for job in given] == [set(found), set(found[1:])]


def test_workers_are_shut_down_when_the_run_is_stopped(setting):
    executor = Fragile(setting, 3, {})
    running: Iterator[list[SampleResult]] = in_parallel(worker_spec("tiny"), executor)(
        jobs(setting)
    )
    next(running)
    running.close()
    assert executor.ended == 3


def test_all_workers_load_before_one_takes_its_job(setting):
    """A large job is sent only when its worker has loaded, and blocks until then."""
    started = []

    class Counted(Fragile):
        def submit(self, worker: int, job: EvalJob) -> None:
            started.append(self.started)
            super().submit(worker, job)

    assert list(in_parallel(worker_spec("tiny"), Counted(setting, 3, {}))(jobs(setting, 4)))
    assert started == [3] * 4
