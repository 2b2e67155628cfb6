# SPDX-License-Identifier: Apache-2.0
"""Who may ask the proxy, and how much they may send."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from kvfold.serve.gate import GUARDED, check_key, too_large


@dataclass(frozen=True)
class Door:
    """`api_key` is asked for where one is set, as vLLM does; bodies have at most `body` bytes."""

    api_key: str | None
    body: int

    def check(self, request: Request) -> None:
        """Raises ApiError without the key."""
        if request.url.path.startswith(GUARDED):
            check_key(request.headers.get("authorization", "").encode("latin-1"), self.api_key)

    async def read(self, request: Request) -> bytes:
        """The body of a request that may ask; raises ApiError for a larger one."""
        self.check(request)
        content = bytearray()
        async for piece in request.stream():
            content += piece
            if len(content) > self.body:
                raise too_large(self.body)
        return bytes(content)
