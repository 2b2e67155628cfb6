# SPDX-License-Identifier: Apache-2.0
"""Workers that are actors of a Ray cluster, on whatever machines it has."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvfold.errors import KvfoldError
from kvfold.jobs.executor import Died, J, R, Work, Workers, start, together


def cluster(work: Work[J, R], address: str, count: int | None) -> Workers[J, R]:
    """`count` actors, by default one for each of the cluster's GPUs, or cores where it has none.

    Every machine needs kvfold and the model. Raises KvfoldError where Ray is missing, or
    nothing answers at `address`.
    """
    return together(work, Actors(work, address, count))


class _Actor:
    """An actor, and what it has been asked for."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.asked: Any = None


class Actors:
    """A cluster's crew."""

    def __init__(self, work: Work[Any, Any], address: str, count: int | None) -> None:
        try:
            import ray
        except ImportError as missing:
            raise KvfoldError("a cluster needs Ray: pip install 'kvfold[ray]'") from missing
        self.work, self.ray = work, ray
        if not ray.is_initialized():
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError, RuntimeError) as problem:
                raise KvfoldError(f"no Ray cluster at {address}: {problem}") from problem
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        self.needs = {"num_gpus": 1} if gpus else {"num_cpus": 1}
        self.count = count or gpus or int(resources["CPU"])

    def hire(self) -> _Actor:
        return _Actor(self.ray.remote(_Runner).options(**self.needs).remote(self.work, self.count))

    def give(self, worker: _Actor, job: Any) -> None:
        worker.asked = worker.handle.run.remote(job)

    def ready(self, busy: Sequence[_Actor]) -> list[_Actor]:
        done, _ = self.ray.wait([worker.asked for worker in busy])
        return [worker for worker in busy if worker.asked in done]

    def take(self, worker: _Actor) -> Any:
        try:
            return self.ray.get(worker.asked)
        except self.ray.exceptions.RayActorError as gone:
            raise Died from gone

    def dismiss(self, idle: Sequence[_Actor], busy: Sequence[_Actor]) -> None:
        for worker in (*idle, *busy):
            self.ray.kill(worker.handle)


class _Runner:
    """What runs in an actor."""

    def __init__(self, work: Work[Any, Any], count: int) -> None:
        self.work = work
        self.model, self.tokenizer = start(work, count)

    def run(self, job: Any) -> Any:
        return self.work.run(self.model, self.tokenizer, job)
