# SPDX-License-Identifier: Apache-2.0
"""What every request to the API passes first: the key, whether the server stops, its size."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvfold.serve.bodies import Values
from kvfold.serve.errors import ApiError
from kvfold.serve.workers import Workers

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

GUARDED = "/v1/"
# Its content is a file as it is: nothing in it is parsed.
FORM = b"multipart/form-data"


class Gate:
    """An ASGI application around another one; it reads no body itself, and keeps none.

    Bodies are counted as they come in, whatever length a client gave, and so are their JSON values;
    those of a full queue are not read.
    """

    def __init__(
        self, app: App, *, api_key: str | None, body: int, values: int, workers: Workers
    ) -> None:
        self.app, self.body, self.values, self.workers = app, body, values, workers
        self.api_key = api_key

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Lets a request through, or answers it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            if scope["path"].startswith(GUARDED):
                check_key(headers.get(b"authorization", b""), self.api_key)
                posted = scope["method"] == "POST"
                self.workers.check_room() if posted else self.workers.check_open()
            length = headers.get(b"content-length", b"0")
            if not length.isdigit() or int(length[:20]) > self.body:
                raise too_large(self.body)
        except ApiError as refused:
            await refused.response()(scope, receive, send)
            return
        form = headers.get(b"content-type", b"").strip().lower().startswith(FORM)
        await self.app(scope, self._counted(receive, form), send)

    def _counted(self, receive: Receive, form: bool) -> Receive:
        total, values = 0, Values(self.values)

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            piece = message.get("body", b"")
            total += len(piece)
            if total > self.body:
                raise too_large(self.body)
            if not form:
                values.feed(piece)
            return message

        return counted


def check_key(header: bytes, api_key: str | None) -> None:
    """Raises ApiError where an Authorization header does not hold the key, if one is set."""
    scheme, _, given = header.partition(b" ")
    if api_key is None:
        return
    right = hmac.compare_digest(given.strip(), api_key.encode())
    if scheme.lower() != b"bearer" or not right:
        message = "give the server's API key as `Authorization: Bearer KEY`"
        raise ApiError(401, message, code="invalid_api_key")


def too_large(most: int) -> ApiError:
    """Of a body of more than `most` bytes."""
    message = f"the body is larger than the {most} bytes that the server takes"
    return ApiError(413, message, code="body_too_large")
