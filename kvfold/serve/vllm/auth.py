# SPDX-License-Identifier: Apache-2.0
"""API key and limits of request bodies for the proxy."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from kvfold.serve.limits import OPEN, check_client, counted
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
        piece = counted(request.receive, self.body, self.values, self.timeout)
        return await Request(request.scope, piece).body()
