# SPDX-License-Identifier: Apache-2.0
"""Texts that come with a request, compressed by a process with a model of its own.

vLLM reads nothing of such a text: its entries are injected as those of any context file. The same
process levels context files whose heads keep different numbers of entries.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread

from kvfold.contexts.files.format import read_header
from kvfold.errors import KvfoldError
from kvfold.hf.header import digest
from kvfold.jobs.compress import CompressJob, CompressOptions, CompressResult, Job, LevelJob
from kvfold.jobs.executor import RunJobs
from kvfold.methods.base import spelled_out
from kvfold.serve.context_folder import SUFFIX
from kvfold.serve.errors import ApiError
from kvfold.serve.vllm.methods import LEVEL
from kvfold.serve.vllm.placeholders import salt

# Prefix of the ids of contexts that a request brought without naming them.
OWN = "auto-"
WAITING = 64  # texts that may wait


class Arrivals:
    """Context files made of texts on arrival, by `run`, with the same `options` for all.

    `most` bounds the files of unnamed texts and the levelled copies in `folder`: the oldest are
    removed.
    """

    def __init__(
        self,
        folder: Path,
        options: CompressOptions,
        run: RunJobs[Job, CompressResult],
        most: int = 1000,
    ) -> None:
        self.folder, self.options, self.most = folder, options, most
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._running: dict[Path, Future[CompressResult]] = {}
        self._lock = Lock()
        Thread(target=self._work, args=(run,), name="kvfold arrivals", daemon=True).start()

    def id_of(self, text: str) -> str:
        """The id of an unnamed text: the same for the same text, method, budget and level."""
        method, budget = spelled_out(self.options.file_method), str(self.options.budget)
        return OWN + digest(json.dumps([method, budget, text]))

    async def made(self, text: str, name: str | None = None) -> str:
        """The id of the context of a text; an unnamed text is compressed once.

        Raises ApiError for a name that is taken, a text that cannot be compressed, and for too many
        texts at once.
        """
        found = name or self.id_of(text)
        path = self.folder / f"{found}{SUFFIX}"
        if path.exists():
            if name is not None:
                raise ApiError(409, f"there is a context {name!r} already", param="id")
            return found
        await self._done(CompressJob(text, path, self.options), "context")
        return found

    async def levelled(self, name: str) -> str:
        """The id of a levelled copy of the context file `name`, made once for each version of it.

        Raises ApiError for a file that cannot be levelled, and ContextFileError.
        """
        source, rule = self.folder / f"{name}{SUFFIX}", self.options.level or LEVEL
        found = OWN + digest(json.dumps([salt(read_header(source)), rule]))
        path = self.folder / f"{found}{SUFFIX}"
        if not path.exists():
            job = LevelJob(source, path, rule, self.options.prefill_chunk)
            await self._done(job, "context_id")
        return found

    async def _done(self, job: Job, param: str) -> None:
        """Runs a job, once for all that wait for it; raises ApiError if it failed."""
        result = await asyncio.shield(asyncio.wrap_future(self._job(job)))
        if result.why is not None:
            raise ApiError(400, result.why, code="context_refused", param=param)

    def _job(self, job: Job) -> Future[CompressResult]:
        with self._lock:
            if job.path not in self._running:
                if len(self._running) >= WAITING:
                    raise ApiError(503, f"{WAITING} texts are waiting already", retry_after=10)
                self._running[job.path] = Future()
                self._jobs.put(job)
            return self._running[job.path]

    def _work(self, run: RunJobs[Job, CompressResult]) -> None:
        """Runs jobs for ever, in a thread; an error of the process ends those that wait."""
        while True:
            try:
                for result in run(self._each()):
                    self._remove_oldest()
                    self._end(result)
            except (KvfoldError, OSError, RuntimeError) as problem:
                for path in list(self._running):
                    self._end(CompressResult(path, None, str(problem)))

    def _end(self, result: CompressResult) -> None:
        with self._lock:
            waiting = self._running.pop(result.path, None)
        if waiting is not None:
            waiting.set_result(result)

    def _each(self) -> Iterator[Job]:
        while True:
            yield self._jobs.get()

    def _remove_oldest(self) -> None:
        files = sorted(self._own(), key=lambda path: path.stat().st_mtime_ns)
        for path in files[: max(0, len(files) - self.most)]:
            path.unlink(missing_ok=True)

    def _own(self) -> Iterable[Path]:
        return self.folder.glob(f"{OWN}*{SUFFIX}")
