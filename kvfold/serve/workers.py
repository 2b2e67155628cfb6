# SPDX-License-Identifier: Apache-2.0
"""A few threads, and a bounded queue before them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Event, Lock
from typing import Any

from kvfold.serve.errors import ApiError

# How much the newest duration counts in the mean.
NEWEST = 0.2


class Workers:
    """`count` threads that compute, before which at most `queue` jobs wait."""

    def __init__(self, count: int, queue: int) -> None:
        self.count, self.queue = count, queue
        self.arriving = self.admitted = self.running = 0
        self.seconds = 1.0
        self.closing = False
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(count, "kvfold worker")
        self._cancels: set[Event] = set()

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return self.admitted - self.running

    def arrive(self) -> Seat:
        """A place for the job of a request that begins; raises ApiError for a full queue."""
        with self._lock:
            self._check_room()
            self.arriving += 1
        return Seat(self)

    def submit(self, work: Callable[[], Any], cancelled: Event, seat: Seat) -> Future[Any]:
        """Runs `work` in the place of `seat` when a thread is free; raises ApiError at the end."""
        with self._lock:
            self.check_open()
            seat.vacate()
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
        """Raises ApiError when nothing new is taken."""
        if self.closing:
            raise stopping()

    def _check_room(self) -> None:
        self.check_open()
        taken = self.admitted + self.arriving
        if taken >= self.count + self.queue:
            raise ApiError(
                429,
                f"{self.waiting + self.arriving} requests are waiting already: try again later",
                code="queue_full",
                retry_after=max(1, math.ceil(self.seconds * taken / self.count)),
            )

    def left(self, seat: Seat) -> None:
        """A request ended before it became a job, or after."""
        with self._lock:
            seat.vacate()

    def cancel(self) -> None:
        """Ends what runs at its next token."""
        with self._lock:
            for cancelled in self._cancels:
                cancelled.set()

    def close(self) -> None:
        """Waits for what runs; what waits is dropped."""
        self.closing = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        with self._lock:
            self.running += 1
        try:
            return work()
        finally:
            # The place is free before anyone hears of the end: who heard may come again at once.
            with self._lock:
                self.running -= 1
                self.admitted -= 1
                self.seconds += NEWEST * (time.perf_counter() - started - self.seconds)


class Seat:
    """The place that a request holds in the queue while it comes in, before it is a job."""

    def __init__(self, workers: Workers) -> None:
        self._workers, self._taken = workers, True

    def leave(self) -> None:
        """Frees the place where no job has taken it over."""
        self._workers.left(self)

    def vacate(self) -> None:
        """The same, with the lock of the workers held."""
        self._workers.arriving -= self._taken
        self._taken = False


class Job:
    """Work in a worker's thread, whose events are awaited one by one by the loop that made it.

    `work` is given where to put events, and a flag that says when they are no longer wanted. What
    it returns is the last event, and what it raises is raised to whom waits.
    """

    def __init__(
        self, workers: Workers, work: Callable[[Callable[[Any], None], Event], Any], seat: Seat
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = Event()
        self._future = workers.submit(lambda: work(self._put, self.cancelled), self.cancelled, seat)
        self._future.add_done_callback(self._ended)

    async def next(self) -> Any:
        """The next event."""
        event = await self._events.get()
        if isinstance(event, BaseException):
            raise event
        return event

    def close(self) -> None:
        """What is still to come is not wanted."""
        self.cancelled.set()
        self._future.cancel()

    def _put(self, event: Any) -> None:
        # The loop may have ended before the thread does.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def _ended(self, future: Future[Any]) -> None:
        if future.cancelled():
            self._put(stopping())
        else:
            self._put(future.exception() or future.result())


def stopping() -> ApiError:
    """What is said when the server goes down."""
    return ApiError(503, "the server is stopping", code="stopping", retry_after=5)
