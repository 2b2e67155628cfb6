# SPDX-License-Identifier: Apache-2.0
"""Worker threads, a bounded queue before them, and jobs that end where their client hangs up."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Event, Lock
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from kvfold.serve.errors import ApiError

Result = TypeVar("Result")

# Key of the scope of a request: its place in the queue, until its job takes it over.
RESERVATION = "kvfold.reservation"
# Weight of the newest duration in the moving mean.
NEWEST = 0.2


class WorkerThreads:
    """`count` threads, and a queue of at most `queue` jobs that wait for one.

    `seconds` is a moving mean of a job's duration, for `Retry-After`.
    """

    def __init__(self, count: int, queue: int) -> None:
        self.count, self.queue = count, queue
        self.reserved = self.admitted = self.running = 0
        self.seconds = 1.0
        self.closing = False
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(count, "kvfold worker")
        self._cancels: set[Event] = set()

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return self.admitted - self.running

    @property
    def idle(self) -> bool:
        """True if no request runs, waits or is being received."""
        return not self.admitted and not self.reserved

    def reserve(self) -> Reservation:
        """Reserves a place for a request that begins; raises ApiError if the queue is full."""
        with self._lock:
            self._check_room()
            self.reserved += 1
        return Reservation(self)

    def submit(
        self, work: Callable[[], Any], cancelled: Event, reservation: Reservation
    ) -> Future[Any]:
        """Queues `work` in a reserved place; raises ApiError if the server stops."""
        with self._lock:
            self.check_open()
            reservation.release_locked()
            self.admitted += 1
            self._cancels.add(cancelled)

        def left(future: Future[Any]) -> None:
            with self._lock:
                if future.cancelled():
                    self.admitted -= 1
                self._cancels.discard(cancelled)

        future = self._pool.submit(self._run, work)
        future.add_done_callback(left)
        return future

    def check_open(self) -> None:
        """Raises ApiError if the server is stopping."""
        if self.closing:
            raise stopping()

    def _check_room(self) -> None:
        self.check_open()
        taken = self.admitted + self.reserved
        if taken >= self.count + self.queue:
            raise ApiError(
                429,
                f"{self.waiting + self.reserved} requests are waiting already: try again later",
                code="queue_full",
                retry_after=max(1, math.ceil(self.seconds * taken / self.count)),
            )

    def cancel(self) -> None:
        """Sets the cancel flag of every job; a running one ends at its next token."""
        with self._lock:
            for cancelled in self._cancels:
                cancelled.set()

    def close(self) -> None:
        """Drops waiting jobs and waits for running ones."""
        self.closing = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        with self._lock:
            self.running += 1
        try:
            return work()
        except BaseException as problem:
            _drop_locals(problem)
            raise
        finally:
            # The place is free before the result is published, so that a client can send its next
            # request at once.
            with self._lock:
                self.running -= 1
                self.admitted -= 1
                self.seconds += NEWEST * (time.perf_counter() - started - self.seconds)


class Reservation:
    """A place in the queue, reserved by a request until its job is queued."""

    def __init__(self, workers: WorkerThreads) -> None:
        self._workers, self._taken = workers, True

    def release(self) -> None:
        """Frees the place if no job has taken it over."""
        with self._workers._lock:
            self.release_locked()

    def release_locked(self) -> None:
        """Frees the place; the caller holds the workers' lock."""
        self._workers.reserved -= self._taken
        self._taken = False


class RequestJob:
    """Work of a request in a worker thread, whose events the creating event loop awaits one by one.

    `work(put, cancelled)` puts events, and checks the flag `cancelled`, which is set if the client
    disconnects first. Its return value is the last event; its exception is raised by `next`. Raises
    ApiError if the server is stopping.
    """

    def __init__(
        self,
        request: Request,
        workers: WorkerThreads,
        work: Callable[[Callable[[Any], None], Event], Any],
    ) -> None:
        self.request = request
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = Event()
        self._future = workers.submit(
            lambda: work(self._put, self.cancelled), self.cancelled, request.scope[RESERVATION]
        )
        self._future.add_done_callback(self._ended)

    async def result(self, coming: Coroutine[Any, Any, Result] | None = None) -> Result:
        """The next event, or the result of awaiting `coming`; closes the job where that fails."""
        try:
            return await unless_gone(self.request, coming or self.next())
        except BaseException:
            self.close()
            raise

    async def next(self) -> Any:
        """The next event; raises what the work raised."""
        event = await self._events.get()
        if isinstance(event, BaseException):
            raise event
        return event

    def close(self) -> None:
        """Cancels the work: further events are not wanted."""
        self.cancelled.set()
        self._future.cancel()

    async def aclose(self) -> None:
        """As `close`, for the end of a stream of its events."""
        self.close()

    def _put(self, event: Any) -> None:
        # The loop may be closed before the thread ends.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def _ended(self, future: Future[Any]) -> None:
        if future.cancelled():
            self._put(stopping())
        else:
            self._put(future.exception() or future.result())


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


async def _hung_up(request: Request) -> None:
    """Waits until the client has disconnected; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def stopping() -> ApiError:
    """The error for requests while the server stops."""
    return ApiError(503, "the server is stopping", code="stopping", retry_after=5)


def _drop_locals(problem: BaseException) -> None:
    """Drops the local variables of all functions that an exception, and those before it, left.

    They hold a request's tensors, and with the future that holds the exception form a cycle, which
    only a full garbage collection ends. Generators that another caller goes on with stay.
    """
    each: BaseException | None = problem
    while each is not None:
        step = each.__traceback__
        while step is not None:
            if not step.tb_frame.f_code.co_flags & inspect.CO_GENERATOR:
                with suppress(RuntimeError):  # it still runs
                    step.tb_frame.clear()
            step = step.tb_next
        each = each.__context__
