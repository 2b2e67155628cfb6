# SPDX-License-Identifier: Apache-2.0
"""Detection of clients that disconnect before their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from kvfold.serve.worker_threads import WorkerJob

Result = TypeVar("Result")


class HungUp(Exception):
    """The client has disconnected."""


async def unless_gone(
    request: Request, job: WorkerJob, coming: Coroutine[Any, Any, Result]
) -> Result:
    """The result of awaiting `coming`; if the client disconnects first, closes `job`.

    Raises HungUp on a disconnect, and what `coming` raises.
    """
    waiting, gone = asyncio.ensure_future(coming), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise HungUp
        return waiting.result()
    except BaseException:
        job.close()
        raise
    finally:
        waiting.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    """Waits until the client has disconnected; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
