# SPDX-License-Identifier: Apache-2.0
"""The server process: a listening socket, and a stop that lets running answers end."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from kvfold.errors import KvfoldError
from kvfold.serve.app import build
from kvfold.serve.connections import limited
from kvfold.serve.engine import Engine

# Seconds after the grace for clients to read output that is ready.
LAST_BYTES = 5
# Seconds that a connection stays open between two requests.
IDLE = 5


def listening(host: str, port: int) -> socket.socket:
    """A bound socket; raises KvfoldError if the address is in use or not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as problem:
        bound.close()
        raise KvfoldError(f"cannot listen on {host} port {port}: {problem}") from problem
    return bound


class GracefulServer(uvicorn.Server):
    """uvicorn server with a graceful stop: accepted requests finish, new ones get a 503.

    `announce` is called when the server listens.
    """

    def __init__(self, engine: Engine, announce: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                build(engine),
                http=limited(engine.settings.connections, engine.settings.client_timeout),  # type: ignore[arg-type]
                timeout_keep_alive=min(IDLE, math.ceil(engine.settings.client_timeout)),
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=LAST_BYTES,
            )
        )
        self.engine, self.announce = engine, announce
        self._until: float | None = None

    def stop(self) -> None:
        """Stops when running answers have ended or the grace is over; at once if called twice."""
        grace = self.engine.settings.grace if self._until is None else 0.0
        self.engine.workers.closing = True
        self._until = time.monotonic() + grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handler of SIGINT and SIGTERM."""
        self.stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts listening, then announces it."""
        await super().startup(sockets)
        self.announce()

    async def on_tick(self, counter: int) -> bool:
        """True if the server is to exit; uvicorn calls it ten times a second."""
        if self._until is not None:
            over = time.monotonic() > self._until
            if over:
                self.engine.workers.cancel()
            self.should_exit |= over or not self.engine.workers.admitted
        return await super().on_tick(counter)

    def run(self, sockets: list[socket.socket] | None = None) -> Any:
        """Serves on bound sockets until stopped, then closes the engine."""
        try:
            return super().run(sockets)
        finally:
            self.engine.close()
