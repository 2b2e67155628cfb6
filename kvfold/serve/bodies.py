# SPDX-License-Identifier: Apache-2.0
"""JSON from clients: its values are counted while it comes in, and it is parsed in a thread.

A list of a million zeros is a small body and many objects: what they cost is bounded by their
number, not by their bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from kvfold.serve.errors import ApiError

# The rest of a text: possessive, so that nothing is remembered of it.
TEXT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
MARKS = (b",", b"[", b"{")


class Values:
    """Counts the values of a JSON text, names included, as its pieces come in.

    What is no JSON is counted as well as it goes; it is refused when it is parsed.
    """

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0
        self._in_text = self._escaped = False

    def feed(self, piece: bytes) -> None:
        """The next piece; raises ApiError beyond `most` values."""
        at, self._escaped = int(self._escaped), False
        while at < len(piece):
            at = self._rest_of_text(piece, at) if self._in_text else self._up_to_text(piece, at)

    def _rest_of_text(self, piece: bytes, at: int) -> int:
        end = at + len(TEXT.match(piece, at)[0])  # type: ignore[index]  # it matches nothing too
        # It ends at a quote, with the piece, or at a backslash whose character comes in the next.
        self._escaped = piece[end : end + 1] == b"\\"
        self._in_text = end == len(piece) or self._escaped
        return end + 1

    def _up_to_text(self, piece: bytes, at: int) -> int:
        quote = piece.find(b'"', at)
        self._in_text = quote >= 0
        end = quote if self._in_text else len(piece)
        self.count += self._in_text + sum(piece.count(mark, at, end) for mark in MARKS)
        if self.count > self.most:
            message = f"the body holds more than the {self.most} values that the server takes"
            raise ApiError(413, message, code="too_many_values")
        return end + 1


class _Apart(Request):
    """A request whose JSON is parsed in a thread, as a large one takes a while."""

    async def json(self) -> Any:
        """The body's content; raises JSONDecodeError for what is no JSON in UTF-8."""
        return await run_in_threadpool(_parsed, await self.body())


def _parsed(body: bytes) -> Any:
    """JSON in UTF-8 only, in which its values were counted; `json.loads` would take UTF-16 too."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise json.JSONDecodeError("the body is not UTF-8", "", problem.start) from problem
    return json.loads(text)


class Route(APIRoute):
    """A route that parses bodies in a thread."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """As FastAPI's own."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_Apart(request.scope, request.receive))

        return handler
