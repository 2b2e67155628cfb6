# SPDX-License-Identifier: Apache-2.0
"""Workers that are processes of this machine."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from kvfold.jobs.executor import Died, J, R, Work, Workers, start, together


def processes(work: Work[J, R], count: int) -> Workers[J, R]:
    """`count` processes, each with the model and its share of the cores."""
    return together(work, _Processes(work, count))


class _Worker:
    """A process, and our end of the pipe to it."""

    def __init__(self, work: Work[Any, Any], count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, work, count), daemon=True)
        self.process.start()
        # The process holds the only other end: the pipe is at its end when the process dies.
        theirs.close()


class _Processes:
    def __init__(self, work: Work[Any, Any], count: int) -> None:
        self.work, self.count = work, count

    def hire(self) -> _Worker:
        return _Worker(self.work, self.count)

    def give(self, worker: _Worker, job: Any) -> None:
        try:
            worker.connection.send(job)
        except OSError:
            # It is dead, which shows when its answer is read.
            worker.process.join()

    def ready(self, busy: Sequence[_Worker]) -> list[_Worker]:
        done = wait([worker.connection for worker in busy])
        return [worker for worker in busy if worker.connection in done]

    def take(self, worker: _Worker) -> Any:
        try:
            return worker.connection.recv()
        except (EOFError, OSError) as gone:
            raise Died from gone

    def dismiss(self, idle: Sequence[_Worker], busy: Sequence[_Worker]) -> None:
        for worker in busy:
            worker.process.terminate()
        for worker in idle:
            worker.connection.close()
        for worker in (*idle, *busy):
            worker.process.join()


def _serve(connection: Connection, work: Work[Any, Any], count: int) -> None:
    # Ctrl-C is for the process that waits for this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    model, tokenizer = start(work, count)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(work.run(model, tokenizer, job))
