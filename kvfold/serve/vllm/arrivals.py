# SPDX-License-Identifier: Apache-2.0
"""Texts that come with a request, compressed by a process with a model of its own.

vLLM reads nothing of such a text: its entries are injected as those of any context file. The same
process reads the texts of files again whose heads keep entries that do not fill pages.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread

from kvfold.contexts.files.format import read_header
from kvfold.errors import KvfoldError
from kvfold.fitted.fits import digests_of
from kvfold.hf.header import digest
from kvfold.jobs.compress import CompressJob, CompressOptions, CompressResult, Job, RereadJob
from kvfold.jobs.executor import RunJobs
from kvfold.methods.base import spelled_out
from kvfold.methods.stages.select.one_set import Rule
from kvfold.serve.context_folder import SUFFIX
from kvfold.serve.errors import ApiError
from kvfold.serve.vllm.methods import LEVEL
from kvfold.serve.vllm.placeholders import salt

# Prefix of the ids of contexts that a request brought without naming them, before a digest.
OWN = "auto-"
OWN_FILES = f"{OWN}{'[0-9a-f]' * 32}{SUFFIX}"
WAITING = 64  # texts that may wait


@dataclass(frozen=True)
class _Running:
    """A job that waits or runs, and its result to come."""

    job: Job
    result: Future[CompressResult]


class Arrivals:
    """Context files made of texts on arrival, by `run`, with the same `options` for all.

    `reader` tells the model that reads the texts from any other, as the files outlive the server.
    `shape` is made of uneven files: a rule that levels, or pages of so many entries. `most` bounds
    the files of unnamed texts and of texts read again in `folder`: the oldest are removed. Raises
    ScorerFileError for a fitted file that is damaged.
    """

    def __init__(
        self,
        folder: Path,
        options: CompressOptions,
        run: RunJobs[Job, CompressResult],
        reader: str,
        shape: Rule | int = LEVEL,
        most: int = 1000,
    ) -> None:
        self.folder, self.options, self.shape, self.most = folder, options, shape, most
        method = options.file_method
        made_by = reader, spelled_out(method), digests_of(method.stages()), str(options.budget)
        self._made_by = json.dumps(made_by, sort_keys=True)
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._running: dict[Path, _Running] = {}
        self._lock = Lock()
        Thread(target=self._work, args=(run,), name="kvfold arrivals", daemon=True).start()

    def id_of(self, text: str) -> str:
        """The id of an unnamed text: the same for the same text, model, options and fitted file."""
        return OWN + digest(json.dumps([self._made_by, text]))

    async def made(self, text: str, name: str | None = None) -> str:
        """The id of the context of a text; an unnamed text is compressed once.

        Raises ApiError for a name that is taken or could be an unnamed text's, a text that cannot
        be compressed, and for too many texts at once.
        """
        if name is not None and name.startswith(OWN):
            raise ApiError(
                400, f"ids that begin with {OWN!r} are of unnamed texts: choose another", param="id"
            )
        found = name or self.id_of(text)
        job = CompressJob(text, self.folder / f"{found}{SUFFIX}", self.options)
        await self._done(job, "context", new=name is not None)
        return found

    async def reread(self, name: str) -> str:
        """The id of the context of a file's text in `shape`, made once for each version of it.

        Raises ApiError for a file that cannot be made so, and ContextFileError.
        """
        source, shape = self.folder / f"{name}{SUFFIX}", self.shape
        found = OWN + digest(json.dumps([salt(read_header(source)), shape]))
        path = self.folder / f"{found}{SUFFIX}"
        await self._done(RereadJob(source, path, shape, self.options.prefill_chunk), "context_id")
        return found

    async def _done(self, job: Job, param: str, *, new: bool = False) -> None:
        """Runs a job whose file is not there, once for all that wait for it.

        Raises ApiError if it failed, and as `_coming`.
        """
        coming = self._coming(job, new)
        if coming is None:
            return
        result = await asyncio.shield(asyncio.wrap_future(coming))
        if result.why is not None:
            raise ApiError(400, result.why, code="context_refused", param=param)

    def _coming(self, job: Job, new: bool) -> Future[CompressResult] | None:
        """The result to come of a job, the same for all that ask for its file; None: it is there.

        Raises ApiError for too many jobs, and, for a `new` file, if it is there or another text's.
        """
        with self._lock:
            running = self._running.get(job.path)
            # Both with the lock held: a job that ends in between would be followed by another.
            there = running is None and job.path.exists()
            if new and (there or (running is not None and running.job != job)):
                message = f"there is a context {job.path.stem!r} already"
                raise ApiError(409, message, code="context_exists", param="id")
            if there:
                return None
            if running is None:
                if len(self._running) >= WAITING:
                    raise ApiError(503, f"{WAITING} texts are waiting already", retry_after=10)
                running = self._running[job.path] = _Running(job, Future())
                self._jobs.put(job)
            return running.result

    def _work(self, run: RunJobs[Job, CompressResult]) -> None:
        """Runs jobs for ever, in a thread; an error of the process ends those that wait."""
        while True:
            try:
                for result in run(iter(self._jobs.get, None)):
                    self._remove_oldest()
                    self._end(result)
            except (KvfoldError, OSError, RuntimeError) as problem:
                for path in list(self._running):
                    self._end(CompressResult(path, None, str(problem)))

    def _end(self, result: CompressResult) -> None:
        with self._lock:
            ended = self._running.pop(result.path, None)
        if ended is not None:
            ended.result.set_result(result)

    def _remove_oldest(self) -> None:
        files = sorted(self._own(), key=_modified)
        for path in files[: max(0, len(files) - self.most)]:
            path.unlink(missing_ok=True)

    def _own(self) -> Iterable[Path]:
        return self.folder.glob(OWN_FILES)


def _modified(path: Path) -> int:
    """When a file was written, 0 for one that another server on the folder has removed."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
