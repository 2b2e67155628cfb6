# SPDX-License-Identifier: Apache-2.0
"""Checks before a request is routed: API key or origin, queue, size and time of the body."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvfold.serve.bodies import ValueCounter
from kvfold.serve.cross_origin import is_allowed
from kvfold.serve.errors import ApiError
from kvfold.serve.settings import ServerSettings
from kvfold.serve.worker_threads import RESERVATION, WorkerThreads

# Paths for monitoring, which need no API key.
OPEN = frozenset({"/health", "/ready", "/metrics"})
# An upload is not parsed as JSON, so its values are not counted.
FORM = b"multipart/form-data"


class RequestLimits:
    """ASGI middleware that refuses requests beyond the server's limits.

    A POST reserves its place in the queue before its body is read, so a full queue refuses it
    early. Bytes and JSON values of a body are counted as they arrive, independent of the declared
    length; the body must be complete within the client's timeout. No body is stored here.
    """

    def __init__(self, app: ASGIApp, *, settings: ServerSettings, workers: WorkerThreads) -> None:
        self.app, self.settings, self.workers = app, settings, workers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards a request to the inner application, or answers with the refusal."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # The first of a repeated header counts, as for the parser of the body.
        headers = {name.lower(): value for name, value in reversed(scope["headers"])}
        reservation = None
        try:
            if scope["path"] not in OPEN:
                check_client(
                    headers, scope.get("server"), self.settings.api_key, self.settings.origins
                )
                self.workers.check_open()
            length = headers.get(b"content-length", b"0")
            if not length.isdigit() or int(length[:20]) > self.settings.body:
                raise _too_large(self.settings.body)
            if scope["method"] == "POST":
                reservation = scope[RESERVATION] = self.workers.reserve()
        except ApiError as refused:
            await refused.response()(scope, receive, send)
            return
        try:
            form = headers.get(b"content-type", b"").strip().lower().startswith(FORM)
            values = None if form else self.settings.values
            body = counted(receive, self.settings.body, values, self.settings.client_timeout)
            await self.app(scope, body, send)
        finally:
            if reservation is not None:
                reservation.release()


def counted(receive: Receive, most: int, values: int | None, timeout: float) -> Receive:
    """`receive` for a body of `most` bytes, and `values` JSON values, within `timeout` seconds.

    None: values are not counted. Raises ApiError beyond a limit.
    """
    total, whole, counter = 0, False, None if values is None else ValueCounter(values)
    until = asyncio.get_running_loop().time() + timeout

    async def piece() -> Message:
        nonlocal total, whole
        try:
            # After the body the only message is a disconnect, which has no time limit.
            async with asyncio.timeout_at(None if whole else until):
                message = await receive()
        except TimeoutError:
            told = f"the body was not complete within {timeout:g} seconds, the client's limit"
            raise ApiError(408, told, code="body_too_slow") from None
        content = message.get("body", b"")
        total += len(content)
        if total > most:
            raise _too_large(most)
        if counter is not None:
            counter.feed(content)
        whole = whole or not message.get("more_body", False)
        return message

    return piece


def check_client(
    headers: Mapping[bytes, bytes], server: Any, api_key: str | None, origins: tuple[str, ...] = ()
) -> None:
    """Raises ApiError for a wrong API key; without a key, for requests from other sites' pages.

    Pages of the allowed `origins` may send requests.

    A web page can send a form to any address its visitor's machine reaches (CSRF): its `Origin` is
    then foreign. A domain that resolves to this machine (DNS rebinding) shows in `Host`.
    `headers` have lower-case names; `server` is ASGI's (host, port).
    """
    if api_key is not None:
        _check_key(headers.get(b"authorization", b""), api_key)
        return
    host = headers.get(b"host", b"").decode("latin-1").lower()
    origin = headers.get(b"origin")
    page = "" if origin is None else origin.decode("latin-1").lower()
    if origin is not None and _site(page) != host and not is_allowed(page, origins):
        message = (
            "web pages of other sites cannot use this server, unless --allow-origin names them"
        )
        raise ApiError(403, message, code="foreign_page")
    if _is_local(server and server[0]) and not _is_local(_name(host)):
        raise ApiError(
            403,
            "the server listens on this machine only, and the header Host names another: behind a "
            "proxy send Host: localhost, or set --api-key",
            code="foreign_page",
        )


def _check_key(header: bytes, api_key: str) -> None:
    scheme, _, given = header.partition(b" ")
    right = hmac.compare_digest(given.strip(), api_key.encode())
    if scheme.lower() != b"bearer" or not right:
        message = "give the server's API key as `Authorization: Bearer KEY`"
        raise ApiError(401, message, code="invalid_api_key")


def _site(origin: str) -> str | None:
    """Host and port of an origin; None if it cannot be parsed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _name(host: str) -> str:
    """A `Host` header without its port; "localhost" if it is empty."""
    try:
        return urlsplit(f"//{host}").hostname or "localhost"
    except ValueError:
        return host


def _is_local(name: str | None) -> bool:
    """True for a loopback address, and for a name without a dot, which public DNS does not hold."""
    try:
        if name is None:
            return False
        address = ip_address(name)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:
        return "." not in str(name)


def _too_large(most: int) -> ApiError:
    message = f"the body is larger than the {most} bytes that the server takes"
    return ApiError(413, message, code="body_too_large")
