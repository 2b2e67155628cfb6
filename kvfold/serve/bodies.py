# SPDX-License-Identifier: Apache-2.0
"""JSON bodies of requests: values counted while the bytes arrive, parsed in a thread.

A list of a million zeros is a small body but many Python objects, so their number is bounded as
well as the bytes.
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

# The rest of a JSON string, up to its closing quote. Possessive: no state to backtrack to.
TEXT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
MARKS = (b",", b"[", b"{")
JSON = "application/json"


class ValueCounter:
    """Upper bound of the values in a JSON text, fed piece by piece.

    Counts strings (names of members included), commas, and opening brackets and braces outside
    strings. Malformed JSON is counted alike, and refused later by the parser.
    """

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0
        self._in_text = self._escaped = False

    def feed(self, piece: bytes) -> None:
        """Counts the next piece; raises ApiError beyond `most` values."""
        at, self._escaped = int(self._escaped), False
        while at < len(piece):
            at = self._rest_of_text(piece, at) if self._in_text else self._up_to_text(piece, at)

    def _rest_of_text(self, piece: bytes, at: int) -> int:
        end = at + len(TEXT.match(piece, at)[0])  # type: ignore[index]  # it matches nothing too
        # The match ends at the closing quote, at the piece's end, or at a backslash whose escaped
        # character is in the next piece.
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


class _ThreadParsedRequest(Request):
    """A request whose JSON is parsed in a thread, so that a large body does not block the loop."""

    async def json(self) -> Any:
        """The parsed body; raises JSONDecodeError if it is not JSON in UTF-8."""
        return await run_in_threadpool(_parsed, await self.body())


def _parsed(body: bytes) -> Any:
    """Parsed JSON, UTF-8 only: `json.loads` accepts UTF-16, too, which is not counted.

    Raises JSONDecodeError for anything else.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise json.JSONDecodeError("the body is not UTF-8", "", problem.start) from problem
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError as problem:
        raise json.JSONDecodeError("lists and objects are nested too deeply", "", 0) from problem
    except ValueError as problem:  # Python reads no integers of thousands of digits
        raise json.JSONDecodeError("a number is too long", "", 0) from problem


def _check_json(kind: str) -> None:
    """Raises ApiError for a content type that FastAPI does not read as JSON."""
    main, _, name = kind.partition(";")[0].strip().lower().partition("/")
    if main != "application" or not (name == "json" or name.endswith("+json")):
        raise ApiError(415, f"send JSON, with the header Content-Type: {JSON}")


class ThreadParsedRoute(APIRoute):
    """A route that parses bodies in a thread, and takes JSON where FastAPI reads the body."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """FastAPI's handler, given requests that parse their body in a thread."""
        handle, of_fastapi = super().get_route_handler(), self.body_field is not None

        async def handler(request: Request) -> Response:
            if of_fastapi:
                _check_json(request.headers.get("content-type", ""))
            return await handle(_ThreadParsedRequest(request.scope, request.receive))

        return handler
