# SPDX-License-Identifier: Apache-2.0
"""Executor over processes on this machine."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from kvfold.jobs.executor import (
    J,
    JobFailed,
    ModelWorker,
    R,
    RunJobs,
    WorkerDied,
    WorkerSpec,
    in_parallel,
    told,
)


def processes(spec: WorkerSpec[J, R], count: int) -> RunJobs[J, R]:
    """`count` processes, each with its own model and 1/`count` of the cores."""
    return in_parallel(spec, _ProcessExecutor(spec, count))


class _ProcessWorker:
    """A worker process and the parent's end of the pipe to it."""

    def __init__(self, spec: WorkerSpec[Any, Any], count: int, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (theirs, spec, count, number)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        with _interrupts_ignored():
            self.process.start()
        # The worker holds the only other end, so its death shows as end of file.
        theirs.close()


class _ProcessExecutor:
    """Executor whose workers are spawned processes with one pipe each."""

    def __init__(self, spec: WorkerSpec[Any, Any], count: int) -> None:
        self.spec, self.count = spec, count
        self.started = 0

    def start_worker(self) -> _ProcessWorker:
        number, self.started = self.started, self.started + 1
        return _ProcessWorker(self.spec, self.count, number)

    def submit(self, worker: _ProcessWorker, job: Any) -> None:
        try:
            worker.connection.send(job)
        except OSError:
            # The worker is dead: `result` raises WorkerDied.
            worker.process.join()

    def wait(self, busy: Sequence[_ProcessWorker]) -> list[_ProcessWorker]:
        done = wait([worker.connection for worker in busy])
        return [worker for worker in busy if worker.connection in done]

    def result(self, worker: _ProcessWorker) -> Any:
        try:
            return worker.connection.recv()
        except (EOFError, OSError) as gone:
            raise WorkerDied from gone

    def shutdown(self, idle: Sequence[_ProcessWorker], busy: Sequence[_ProcessWorker]) -> None:
        for worker in busy:
            worker.process.terminate()
        for worker in idle:
            worker.connection.close()
        for worker in (*idle, *busy):
            worker.process.join()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignores Ctrl-C meanwhile, in the main thread; a process that is started inherits that."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(connection: Connection, spec: WorkerSpec[Any, Any], count: int, number: int) -> None:
    """Loop of a worker process: receives jobs and sends results until the pipe is closed."""
    # Ctrl-C is handled by the parent, which then ends its workers, also those of its threads.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = ModelWorker(spec, count, number)
    while True:
        try:
            for result in worker.run(connection.recv()):
                connection.send(result)
        except (EOFError, ConnectionError):
            return
        # A job or a result that cannot be pickled: nothing of it was sent.
        except Exception as problem:
            connection.send(JobFailed(told(problem)))
