# SPDX-License-Identifier: Apache-2.0
"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DATA, EVENTS = "data: ", "text/event-stream"
# Of a stream of events: nobody on the way keeps pieces back.
AT_ONCE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# Characters that end a line for some clients, as for `str.splitlines`.
BREAKS = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"}


def event(content: dict[str, Any]) -> str:
    """An event whose JSON is one line, for every client's notion of a line end."""
    return f"{DATA}{json.dumps(content, ensure_ascii=False).translate(BREAKS)}\n\n"


class ClosedStream(StreamingResponse):
    """A streamed response; `close` is awaited when it ends, also if the client hangs up."""

    def __init__(
        self, pieces: AsyncIterator[Any], close: Callable[[], Awaitable[None]], **options: Any
    ) -> None:
        super().__init__(pieces, **options)
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the pieces, then closes what they came from."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.close()
