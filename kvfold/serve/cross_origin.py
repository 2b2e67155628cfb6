# SPDX-License-Identifier: Apache-2.0
"""Web pages of other sites that may use the server (CORS)."""

from __future__ import annotations

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvfold.serve.errors import ApiError

ANY = "*"
METHODS = "GET, POST, DELETE"
# Names of headers, which a preflight request asks for and gets back.
NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+( *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
SECONDS = "600"  # a browser may remember the answer to a preflight request


def is_allowed(origin: str, allowed: tuple[str, ...]) -> bool:
    """True for an origin among the allowed ones, of which "*" is any."""
    return ANY in allowed or origin.lower() in allowed


class CrossOrigin:
    """ASGI middleware: names the allowed origin in answers, and answers preflight requests.

    Browsers send these without a key. An origin that is not allowed passes on unchanged.
    """

    def __init__(self, app: ASGIApp, *, allowed: tuple[str, ...]) -> None:
        self.app, self.allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a preflight request; forwards any other."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if origin is None or not is_allowed(origin, self.allowed):
            await self.app(scope, receive, send)
            return

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered["Access-Control-Allow-Origin"] = origin
                answered["Access-Control-Expose-Headers"] = "Retry-After"
                answered.add_vary_header("Origin")
            await send(message)

        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await self._preflight(headers)(scope, receive, marked)
        else:
            await self.app(scope, receive, marked)

    def _preflight(self, headers: Headers) -> ASGIApp:
        wanted = headers.get("access-control-request-headers", "")
        if wanted and not NAMES.fullmatch(wanted):
            return ApiError(400, "the headers asked for are no names").response()
        given = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": SECONDS}
        if wanted:
            given["Access-Control-Allow-Headers"] = wanted
        return Response(status_code=204, headers=given)
