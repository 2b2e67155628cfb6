# SPDX-License-Identifier: Apache-2.0
"""Executor over processes on this machine."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from kvfold.jobs.executor import J, R, Work, WorkerDied, Workers, in_parallel, load_in_worker


def processes(work: Work[J, R], count: int) -> Workers[J, R]:
    """`count` processes, each with its own model and 1/`count` of the cores."""
    return in_parallel(work, _ProcessExecutor(work, count))


class _ProcessWorker:
    """A worker process and the parent's end of the pipe to it."""

    def __init__(self, work: Work[Any, Any], count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, work, count), daemon=True)
        self.process.start()
        # The worker holds the only other end, so its death shows as end of file.
        theirs.close()


class _ProcessExecutor:
    """Executor whose workers are spawned processes with one pipe each."""

    def __init__(self, work: Work[Any, Any], count: int) -> None:
        self.work, self.count = work, count

    def start_worker(self) -> _ProcessWorker:
        return _ProcessWorker(self.work, self.count)

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


def _serve(connection: Connection, work: Work[Any, Any], count: int) -> None:
    """Loop of a worker process: receives jobs and sends results until the pipe is closed."""
    # Ctrl-C is handled by the parent, which then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    model, tokenizer = load_in_worker(work, count)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(work.run(model, tokenizer, job))
