# SPDX-License-Identifier: Apache-2.0
"""Connections: how many there are, and how long a client may take to say what it wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvfold.serve.errors import ApiError


class Connection(H11Protocol):
    """uvicorn's, closed where headers do not come, or answers are not taken, within `timeout` s.

    Beyond `most` connections a new one is told so and closed.
    """

    def __init__(self, most: int, timeout: float, **options: Any) -> None:
        super().__init__(**options)
        self.most, self.timeout = most, timeout
        self._head: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.write(_full(self.most))
            transport.close()
        else:
            self._head = self.loop.call_later(self.timeout, transport.close)

    def data_received(self, data: bytes) -> None:
        """It said something; the time for headers ends with the last of them.

        A body that goes on after its answer has no more time than headers.
        """
        super().data_received(data)
        answered = self.cycle is not None and self.cycle.response_complete
        if self.conn.their_state is not h11.IDLE and not answered:
            self._head = _stopped(self._head)
        elif self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(self.timeout, self.transport.close)

    def pause_writing(self) -> None:
        """It does not take what is written."""
        super().pause_writing()
        self._taking = self.loop.call_later(self.timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """It took it."""
        super().resume_writing()
        self._taking = _stopped(self._taking)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._head, self._taking = _stopped(self._head), _stopped(self._taking)
        super().connection_lost(exc)


def limited(most: int, timeout: float) -> Callable[..., asyncio.Protocol]:
    """What uvicorn makes for every connection: at most `most`, with `timeout` in seconds."""
    return partial(Connection, most, timeout)


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """No timer, in the place of one that is no longer wanted."""
    if timer is not None:
        timer.cancel()
    return None


def _full(most: int) -> bytes:
    """The answer to a connection too many."""
    body = json.dumps(ApiError(503, f"the server has its {most} connections").body()).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
