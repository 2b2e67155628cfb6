# SPDX-License-Identifier: Apache-2.0
"""API key and limits of request bodies for the proxy."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request

from kvfold.serve.bodies import ValueCounter
from kvfold.serve.limits import OPEN, check_client, too_large, too_slow
from kvfold.serve.settings import ServerSettings


@dataclass(frozen=True)
class ProxyAuth:
    """API key, if one is set, and limits of bodies: `body` bytes, `values` JSON values.

    A body must be complete within `timeout` seconds. Paths for monitoring need no key.
    """

    api_key: str | None
    body: int
    values: int = ServerSettings.values
    timeout: float = ServerSettings.client_timeout

    def check(self, request: Request) -> None:
        """Raises ApiError for a request without the key, unless its path is for monitoring."""
        if request.scope["path"] not in OPEN:
            check_client(dict(request.headers.raw), request.scope.get("server"), self.api_key)

    async def read(self, request: Request) -> bytes:
        """The body of a request.

        Raises ApiError without the key, and for too large or slow a body.
        """
        self.check(request)
        try:
            async with asyncio.timeout(self.timeout):
                return await self._read(request)
        except TimeoutError:
            raise too_slow(self.timeout) from None

    async def _read(self, request: Request) -> bytes:
        content, values = bytearray(), ValueCounter(self.values)
        async for piece in request.stream():
            content += piece
            if len(content) > self.body:
                raise too_large(self.body)
            values.feed(piece)
        return bytes(content)
