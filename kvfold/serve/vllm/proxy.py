# SPDX-License-Identifier: Apache-2.0
"""HTTP proxy before vLLM: requests that name a context get its placeholders, others pass as is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvfold.errors import KvfoldError
from kvfold.serve.errors import HANDLERS, ApiError, invalid
from kvfold.serve.events import AT_ONCE, EVENTS, ClosedStream
from kvfold.serve.limits import OPEN, check_client, counted
from kvfold.serve.request_schemas import (
    SESSION,
    AnswerRequest,
    ChatRequest,
    CompletionRequest,
    ContextRequest,
)
from kvfold.serve.settings import ServerSettings
from kvfold.serve.vllm.arrivals import Arrivals
from kvfold.serve.vllm.catalog import ContextCatalog
from kvfold.serve.vllm.chat_completions import chunks, message
from kvfold.serve.vllm.evictions.asked import EVICT, AskedEviction
from kvfold.serve.vllm.request import ContextPrompt
from kvfold.serve.worker_threads import unless_gone

VERBS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
# Headers of one connection, which are not forwarded.
HOP = {"host", "content-length", "connection", "transfer-encoding", "keep-alive", "upgrade"}
SAMPLING = (
    "model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop",
    "stream", "user",
)  # fmt: skip
A = TypeVar("A", bound=AnswerRequest)


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


class Proxy:
    """Handlers of all routes. `client` reaches vLLM, `longest` is its `max_model_len` in tokens.

    Texts are compressed by `arrivals`; None: they are refused.
    """

    def __init__(
        self,
        contexts: ContextCatalog,
        client: httpx.AsyncClient,
        auth: ProxyAuth,
        longest: int,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.contexts, self.client, self.auth, self.longest = contexts, client, auth, longest
        self.arrivals = arrivals

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        body = await self.auth.read(request)
        asking = await self._asking(request, body, ChatRequest)
        if asking is None:
            return await self._forward(request, body)
        asked = await run_in_threadpool(self.contexts.chat, asking)
        answer = await self._complete(request, asking, asked)
        if answer.status_code != 200:
            return _passed(answer)
        if asking.stream:
            return _events(answer)
        try:
            return JSONResponse(message(json.loads(await answer.aread())))
        finally:
            await answer.aclose()

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        body = await self.auth.read(request)
        asking = await self._asking(request, body, CompletionRequest)
        if asking is None:
            return await self._forward(request, body)
        asked = await run_in_threadpool(self.contexts.complete, asking)
        return _passed(await self._complete(request, asking, asked))

    async def held(self, request: Request) -> dict[str, Any]:
        """`GET /v1/contexts`: all contexts; those that cannot be served with the reason."""
        self.auth.check(request)
        return {"object": "list", "data": await run_in_threadpool(self.contexts.all)}

    async def create(self, request: Request) -> Response:
        """`POST /v1/contexts`: compresses a text, with the server's method and budget."""
        body = await self.auth.read(request)
        try:
            asked = ContextRequest.model_validate_json(body)
        except ValidationError as problem:
            raise invalid(problem.errors()) from None
        for named in ("method", "budget", "system", "chat_template_kwargs"):
            if getattr(asked, named) is not None:
                whole = "method, budget and what stands before a text are the server's"
                raise ApiError(400, f"{whole}: leave {named} out", param=named)
        name = await unless_gone(request, self._arrivals().made(asked.text, asked.id))
        return JSONResponse(await run_in_threadpool(self.contexts.about, name), 201)

    async def other(self, request: Request) -> Response:
        """Any other route, forwarded unchanged."""
        return await self._forward(request, await self.auth.read(request))

    async def _asking(self, request: Request, body: bytes, kind: type[A]) -> A | None:
        """The request, or None if it names and brings no context.

        Its text is compressed first, or that of an uneven context read again.
        """
        if SESSION in request.headers:
            raise _without_sessions()
        found = await run_in_threadpool(_naming_a_context, body, kind)
        if found is None:
            await run_in_threadpool(self._check_eviction, body)
            return None
        asking, text = found
        if text is not None:
            coming = self._arrivals().made(text)
        elif await run_in_threadpool(self.contexts.is_read_first, asking.context_id):
            coming = self._arrivals().reread(str(asking.context_id))
        else:
            return asking
        name = await unless_gone(request, coming)
        return asking.model_copy(update={"context_id": name})

    def _check_eviction(self, body: bytes) -> None:
        """Raises ApiError for an eviction that vLLM would refuse without saying why."""
        given = eviction_of(body)
        if given is None:
            return
        try:
            AskedEviction.of_request(given, self.contexts.served_folder.paged)
        except KvfoldError as problem:
            code = "eviction_refused"
            raise ApiError(400, str(problem), code=code, param="kv_transfer_params") from problem

    def _arrivals(self) -> Arrivals:
        if self.arrivals is None:
            raise ApiError(
                400, "this server compresses no texts: start it with --method", param="context"
            )
        return self.arrivals

    async def _complete(
        self, request: Request, asking: AnswerRequest, asked: ContextPrompt
    ) -> httpx.Response:
        """vLLM's answer to a prompt of placeholders and question tokens."""
        room = max(1, self.longest - len(asked.token_ids))
        tokens = asking.most_tokens or asking.usual_tokens or room
        given = {name: getattr(asking, name) for name in SAMPLING}
        body = {name: value for name, value in given.items() if value is not None}
        if asking.stream_options is not None:
            body["stream_options"] = asking.stream_options.model_dump(exclude_none=True)
        content = json.dumps(body | {"max_tokens": tokens, **asked.body}).encode()
        return await self._send(request, httpx.URL("/v1/completions"), content)

    async def _forward(self, request: Request, body: bytes) -> Response:
        query = request.scope["query_string"]
        path = request.scope["raw_path"] + (b"?" + query if query else b"")
        url = self.client.base_url.copy_with(raw_path=path)
        return _passed(await self._send(request, url, body))

    async def _send(self, request: Request, url: httpx.URL, body: bytes) -> httpx.Response:
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP]
        sent = self.client.build_request(request.method, url, headers=headers, content=body)
        try:
            return await unless_gone(request, self.client.send(sent, stream=True))
        except httpx.HTTPError as problem:
            raise ApiError(503, f"vLLM cannot be reached: {problem}", retry_after=10) from problem


def build(proxy: Proxy) -> FastAPI:
    """The ASGI application of the proxy."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await proxy.client.aclose()

    app = FastAPI(title="kvfold", openapi_url=None, lifespan=lifespan, exception_handlers=HANDLERS)
    app.add_api_route("/v1/chat/completions", proxy.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", proxy.complete, methods=["POST"], response_model=None)
    app.add_api_route("/v1/contexts", proxy.held, methods=["GET"])
    app.add_api_route("/v1/contexts", proxy.create, methods=["POST"], response_model=None)
    app.add_api_route("/{path:path}", proxy.other, methods=VERBS, response_model=None)
    return app


def eviction_of(body: bytes) -> Any:
    """What a request's body asks to evict; None: nothing, or it is no JSON."""
    if EVICT.encode() not in body:
        return None
    try:
        asked = json.loads(body)
    except ValueError:
        return None
    given = asked.get("kv_transfer_params") if isinstance(asked, dict) else None
    return given.get(EVICT) if isinstance(given, dict) else None


def _naming_a_context(body: bytes, kind: type[A]) -> tuple[A, str | None] | None:
    """The parsed request and the text of a context that it brings; None: neither named nor brought.

    Raises ApiError for a malformed one.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    if found.get("session_id") is not None:
        raise _without_sessions()
    text = found.pop("context", None)
    if found.get("context_id") is None and text is None:
        return None
    if text is not None and (found.get("context_id") is not None or not _is_text(text)):
        raise ApiError(400, "context is a text, in place of a context_id", param="context")
    try:
        return kind.model_validate_json(json.dumps(found)), text
    except ValidationError as problem:
        raise invalid(problem.errors()) from None


def _without_sessions() -> ApiError:
    return ApiError(
        400,
        "vLLM serves contexts, and no sessions: for these run kvfold serve without --engine",
        param="session_id",
    )


def _is_text(found: Any) -> bool:
    """True for a string, not empty, that UTF-8 can encode."""
    try:
        return isinstance(found, str) and bool(found.encode())
    except UnicodeEncodeError:
        return False


def _passed(answer: httpx.Response) -> Response:
    """vLLM's answer, unchanged."""
    headers = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
    # Closed, vLLM stops generating for a client that has disconnected.
    pieces, code = answer.aiter_raw(), answer.status_code
    return ClosedStream(pieces, answer.aclose, status_code=code, headers=headers)


def _events(answer: httpx.Response) -> Response:
    """vLLM's stream of completion chunks as chat chunks."""
    pieces = chunks(answer.aiter_bytes())
    return ClosedStream(pieces, answer.aclose, headers=AT_ONCE, media_type=EVENTS)
