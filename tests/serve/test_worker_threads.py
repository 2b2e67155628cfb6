# SPDX-License-Identifier: Apache-2.0
"""What a job that failed leaves behind."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
import torch
from starlette.requests import Request

from kvfold.serve.worker_threads import RESERVATION, RequestJob, Reservation, WorkerThreads


def test_a_failed_job_keeps_no_tensor_until_gc_comes() -> None:
    kept: list[Any] = []

    def fails(put: Any, cancelled: Any) -> None:
        activations = torch.zeros(9)
        kept.append(weakref.ref(activations))
        try:
            raise ValueError("first")
        except ValueError:
            raise RuntimeError("out of memory") from None

    async def ask() -> None:
        workers = WorkerThreads(1, 1)
        workers.reserved = 1
        with pytest.raises(RuntimeError, match="out of memory"):
            request = Request({"type": "http", RESERVATION: Reservation(workers)})
            await RequestJob(request, workers, fails).next()
        workers.close()

    gc.disable()
    try:
        asyncio.run(ask())
        assert kept[0]() is None
    finally:
        gc.enable()
