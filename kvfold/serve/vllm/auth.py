# SPDX-License-Identifier: Apache-2.0
"""Who may ask the proxy, and how much they may send."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request

from kvfold.serve.bodies import Values
from kvfold.serve.limits import OPEN, check_client, too_large, too_slow
from kvfold.serve.settings import Settings


@dataclass(frozen=True)
class Door:
    """`api_key` is asked for where one is set, of every path but those that watch the server.

    Bodies have at most `body` bytes and as many JSON values as in kvfold's own server, and are
    whole within `timeout` seconds.
    """

    api_key: str | None
    body: int
    values: int = Settings.values
    timeout: float = Settings.client_timeout

    def check(self, request: Request) -> None:
        """Raises ApiError without the key; what watches the server needs none."""
        if request.scope["path"] not in OPEN:
            check_client(dict(request.headers.raw), request.scope.get("server"), self.api_key)

    async def read(self, request: Request) -> bytes:
        """The body of a request that may ask; raises ApiError for a larger or slower one."""
        self.check(request)
        try:
            async with asyncio.timeout(self.timeout):
                return await self._read(request)
        except TimeoutError:
            raise too_slow(self.timeout) from None

    async def _read(self, request: Request) -> bytes:
        content, values = bytearray(), Values(self.values)
        async for piece in request.stream():
            content += piece
            if len(content) > self.body:
                raise too_large(self.body)
            values.feed(piece)
        return bytes(content)
