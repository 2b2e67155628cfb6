# SPDX-License-Identifier: Apache-2.0
"""Executor over the actors of a Ray cluster."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvfold.errors import KvfoldError
from kvfold.jobs.executor import (
    J,
    JobFailed,
    ModelFailed,
    ModelWorker,
    R,
    RunJobs,
    WorkerDied,
    WorkerSpec,
    in_parallel,
    told,
)


def cluster(spec: WorkerSpec[J, R], address: str, count: int | None) -> RunJobs[J, R]:
    """`count` actors; by default one per GPU of the cluster, or one per core if it has no GPU.

    Every machine needs kvfold and the model. Raises KvfoldError if Ray is not installed, or no
    cluster answers at `address`.
    """
    return in_parallel(spec, RayExecutor(spec, address, count))


class _ActorWorker:
    """A Ray actor's handle and the reference to its pending result."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.pending: Any = None


class RayExecutor:
    """Executor whose workers are Ray actors with one GPU (or one core) each.

    Raises KvfoldError if Ray is not installed, or no cluster answers at `address`.
    """

    def __init__(self, spec: WorkerSpec[Any, Any], address: str, count: int | None) -> None:
        try:
            import ray
        except ImportError as missing:
            raise KvfoldError("a cluster needs Ray: pip install 'kvfold[ray]'") from missing
        self.spec, self.ray = spec, ray
        if not ray.is_initialized():
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError, RuntimeError) as problem:
                raise KvfoldError(f"no Ray cluster at {address}: {problem}") from problem
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        self.needs = {"num_gpus": 1} if gpus else {"num_cpus": 1}
        self.count = count or gpus or int(resources["CPU"])

    def start_worker(self) -> _ActorWorker:
        actor = self.ray.remote(ModelWorker).options(**self.needs)
        return _ActorWorker(actor.remote(self.spec, self.count))

    def submit(self, worker: _ActorWorker, job: Any) -> None:
        worker.pending = worker.handle.run.options(num_returns="streaming").remote(job)

    def wait(self, busy: Sequence[_ActorWorker]) -> list[_ActorWorker]:
        done, _ = self.ray.wait([worker.pending for worker in busy])
        return [worker for worker in busy if worker.pending in done]

    def result(self, worker: _ActorWorker) -> Any:
        try:
            return self.ray.get(next(worker.pending))
        except self.ray.exceptions.RayActorError as gone:
            # The actor could not be made, as on a machine without kvfold: its last line says why.
            if gone.actor_init_failed:
                return ModelFailed(str(gone).strip().splitlines()[-1])
            raise WorkerDied from gone
        # A job or a result that cannot be pickled.
        except self.ray.exceptions.RayTaskError as failed:
            return JobFailed(told(failed.cause))

    def shutdown(self, idle: Sequence[_ActorWorker], busy: Sequence[_ActorWorker]) -> None:
        for worker in (*idle, *busy):
            self.ray.kill(worker.handle)
