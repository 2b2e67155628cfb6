# SPDX-License-Identifier: Apache-2.0
"""What every request passes first: where it comes from, the key, a place, its size, its time."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from kvfold.serve.bodies import Values
from kvfold.serve.errors import ApiError
from kvfold.serve.settings import Settings
from kvfold.serve.workers import Workers

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

# Asked by what watches the server, which has no key.
OPEN = frozenset({"/health", "/ready", "/metrics"})
# Its content is a file as it is: nothing in it is parsed.
FORM = b"multipart/form-data"
# Where the place of a request waits for the job that takes it over.
SEAT = "kvfold.seat"


class Gate:
    """An ASGI application around another one; it reads no body itself, and keeps none.

    A request that brings a body takes its place in the queue when it begins, so that bodies of a
    full queue are not read. Bodies are counted as they come in, whatever length a client gave, and
    so are their JSON values; they are whole within the client's time.
    """

    def __init__(self, app: App, *, settings: Settings, workers: Workers) -> None:
        self.app, self.settings, self.workers = app, settings, workers

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Lets a request through, or answers it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # Of a header that is given twice the first counts, as for whoever parses the body.
        headers = {name.lower(): value for name, value in reversed(scope["headers"])}
        seat = None
        try:
            if scope["path"] not in OPEN:
                check_client(headers, scope.get("server"), self.settings.api_key)
                self.workers.check_open()
            length = headers.get(b"content-length", b"0")
            if not length.isdigit() or int(length[:20]) > self.settings.body:
                raise too_large(self.settings.body)
            if scope["method"] == "POST":
                seat = scope[SEAT] = self.workers.arrive()
        except ApiError as refused:
            await refused.response()(scope, receive, send)
            return
        try:
            form = headers.get(b"content-type", b"").strip().lower().startswith(FORM)
            await self.app(scope, self._counted(receive, form), send)
        finally:
            if seat is not None:
                seat.leave()

    def _counted(self, receive: Receive, form: bool) -> Receive:
        total, whole, values = 0, False, Values(self.settings.values)
        until = asyncio.get_running_loop().time() + self.settings.client_timeout

        async def counted() -> Message:
            nonlocal total, whole
            try:
                # After its body, what may come from a client is its leaving.
                async with asyncio.timeout_at(None if whole else until):
                    message = await receive()
            except TimeoutError:
                raise too_slow(self.settings.client_timeout) from None
            piece = message.get("body", b"")
            total += len(piece)
            if total > self.settings.body:
                raise too_large(self.settings.body)
            if not form:
                values.feed(piece)
            whole = whole or not message.get("more_body", False)
            return message

        return counted


def check_client(headers: Mapping[bytes, bytes], server: Any, api_key: str | None) -> None:
    """Raises ApiError for a client without the key, or, where none is set, for foreign web pages.

    A page may send a form to any address that its reader's machine reaches, under its own `Origin`;
    behind a name that is made to point at this machine, the `Host` is that name.
    """
    if api_key is not None:
        _check_key(headers.get(b"authorization", b""), api_key)
        return
    host = headers.get(b"host", b"").decode("latin-1").lower()
    origin = headers.get(b"origin")
    foreign = origin is not None and _site(origin.decode("latin-1").lower()) != host
    if foreign or (_is_local(server and server[0]) and not _is_local(_name(host))):
        raise ApiError(403, "web pages of other sites cannot use this server", code="foreign_page")


def _check_key(header: bytes, api_key: str) -> None:
    scheme, _, given = header.partition(b" ")
    right = hmac.compare_digest(given.strip(), api_key.encode())
    if scheme.lower() != b"bearer" or not right:
        message = "give the server's API key as `Authorization: Bearer KEY`"
        raise ApiError(401, message, code="invalid_api_key")


def _site(origin: str) -> str | None:
    """The host, and port, of an origin; None where it is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _name(host: str) -> str:
    """A host without its port; this machine where none is named."""
    try:
        return urlsplit(f"//{host}").hostname or "localhost"
    except ValueError:
        return host


def _is_local(name: str | None) -> bool:
    """Whether an address is this machine's own, or a name none that others give out."""
    try:
        if name is None:
            return False
        address = ip_address(name)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:
        return "." not in str(name)


def too_large(most: int) -> ApiError:
    """Of a body of more than `most` bytes."""
    message = f"the body is larger than the {most} bytes that the server takes"
    return ApiError(413, message, code="body_too_large")


def too_slow(seconds: float) -> ApiError:
    """Of a body that is not whole in time."""
    message = f"the body was not whole within the {seconds:g} seconds that a client has for it"
    return ApiError(408, message, code="body_too_slow")
