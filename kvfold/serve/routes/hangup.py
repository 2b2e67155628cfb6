# SPDX-License-Identifier: Apache-2.0
"""Detection of clients that disconnect before their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from threading import Event
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from kvfold.serve.limits import RESERVATION
from kvfold.serve.worker_threads import WorkerJob, WorkerThreads

Result = TypeVar("Result")


async def unless_gone(request: Request, coming: Coroutine[Any, Any, Result]) -> Result:
    """The result of awaiting `coming`; cancels it and raises ClientDisconnect on a disconnect."""
    waiting, gone = asyncio.ensure_future(coming), asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise ClientDisconnect
        return waiting.result()
    finally:
        waiting.cancel()
        gone.cancel()


class RequestJob(WorkerJob):
    """The work of a request in a worker thread, cancelled if its client disconnects first."""

    def __init__(
        self,
        request: Request,
        workers: WorkerThreads,
        work: Callable[[Callable[[Any], None], Event], Any],
    ) -> None:
        super().__init__(workers, work, request.scope[RESERVATION])
        self.request = request

    async def result(self, coming: Coroutine[Any, Any, Result] | None = None) -> Result:
        """The next event, or the result of awaiting `coming`; closes the job where that fails."""
        try:
            return await unless_gone(self.request, coming or self.next())
        except BaseException:
            self.close()
            raise

    async def aclose(self) -> None:
        """As `close`, for the end of a stream of its events."""
        self.close()


async def _hung_up(request: Request) -> None:
    """Waits until the client has disconnected; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
