# SPDX-License-Identifier: Apache-2.0
"""Limits per connection: number of open ones, time for headers, time to read output."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvfold.serve.errors import ApiError


class LimitedConnection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a limit on connections and two timeouts.

    A connection is closed if headers do not arrive, or pending output is not read, within
    `timeout` seconds. Beyond `most` connections a new one gets a 503 and is closed.
    """

    def __init__(self, most: int, timeout: float, **options: Any) -> None:
        super().__init__(**options)
        self.most, self.timeout = most, timeout
        self._header_timer: asyncio.TimerHandle | None = None
        self._output_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timeout for headers, or refuses the connection."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.write(_too_many(self.most))
            transport.close()
        else:
            self._header_timer = self.loop.call_later(self.timeout, transport.close)

    def data_received(self, data: bytes) -> None:
        """Stops the timeout once headers are complete, and starts it for the next request.

        A body that still arrives after its answer was sent is under the same timeout.
        """
        super().data_received(data)
        answered = self.cycle is not None and self.cycle.response_complete
        if self.conn.their_state is not h11.IDLE and not answered:
            self._header_timer = _cancelled(self._header_timer)
        elif self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(self.timeout, self.transport.close)

    def pause_writing(self) -> None:
        """Output is pending: starts the timeout for reading it."""
        super().pause_writing()
        self._output_timer = self.loop.call_later(self.timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Output was read: stops that timeout."""
        super().resume_writing()
        self._output_timer = _cancelled(self._output_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops both timeouts."""
        self._header_timer, self._output_timer = (
            _cancelled(self._header_timer),
            _cancelled(self._output_timer),
        )
        super().connection_lost(exc)


def limited(most: int, timeout: float) -> Callable[..., asyncio.Protocol]:
    """Protocol factory for uvicorn: at most `most` connections, `timeout` in seconds."""
    return partial(LimitedConnection, most, timeout)


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancels a timer, if any; returns None to store in its place."""
    if timer is not None:
        timer.cancel()
    return None


def _too_many(most: int) -> bytes:
    """The raw 503 answer to a connection beyond the limit."""
    body = json.dumps(ApiError(503, f"the server has its {most} connections").body()).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
