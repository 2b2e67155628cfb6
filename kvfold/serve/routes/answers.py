# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from kvfold.serve.bodies import ThreadParsedRoute
from kvfold.serve.decoding import AnswerFinished, AnswerStarted
from kvfold.serve.engine import Engine
from kvfold.serve.errors import ApiError
from kvfold.serve.events import AT_ONCE, EVENTS, ClosedStream
from kvfold.serve.metrics import ServerMetrics
from kvfold.serve.openai_format import ChatWriter, CompletionWriter, events, whole
from kvfold.serve.request_schemas import SESSION, ChatRequest, CompletionRequest
from kvfold.serve.response_schemas import ChatCompletion, Completion
from kvfold.serve.routes.hangup import RequestJob

STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {EVENTS: {"schema": {"type": "string"}}}}
}


def router(engine: Engine, metrics: ServerMetrics) -> APIRouter:
    """Routes of chat and text completions."""
    made = APIRouter(prefix="/v1", route_class=ThreadParsedRoute)

    async def answer(
        request: Request, asked: ChatRequest | CompletionRequest, kind: type[ChatWriter]
    ) -> Any:
        if asked.model != engine.name:
            message = f"there is no model {asked.model!r}: this server has {engine.name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")
        if (named := request.headers.get(SESSION)) is not None:
            asked = _in_session(asked, named)
        job = RequestJob(request, engine.workers, partial(engine.answer, asked))
        # `AnswerStarted` comes once the request is checked: a refusal before still sets the status.
        started: AnswerStarted = await job.result()
        metrics.tokens.labels("prompt").inc(started.prompt)
        metrics.tokens.labels("cached").inc(started.cached)
        alone = not (isinstance(asked, ChatRequest) and asked.session_id)
        if alone and asked.context_id is None and asked.prefix_cache:
            metrics.prefixes.labels("hit" if started.cached else "miss").inc()
        writer = kind(engine.name, started, counted)
        if asked.stream:
            pieces = events(job, writer, asked.usage_wanted)
            return ClosedStream(pieces, job.aclose, headers=AT_ONCE, media_type=EVENTS)
        return await job.result(whole(job, writer))

    def counted(done: AnswerFinished) -> None:
        metrics.tokens.labels("generated").inc(done.tokens)

    @made.post("/chat/completions", response_model=ChatCompletion, responses=STREAM)
    async def chat_completions(request: Request, body: ChatRequest) -> Any:
        """Answers a conversation."""
        return await answer(request, body, ChatWriter)

    @made.post("/completions", response_model=Completion, responses=STREAM)
    async def completions(request: Request, body: CompletionRequest) -> Any:
        """Continues a prompt."""
        return await answer(request, body, CompletionWriter)

    return made


def _in_session(asked: ChatRequest | CompletionRequest, named: str) -> ChatRequest:
    """The request with the session of its header; raises ApiError for another id in the body."""
    if not isinstance(asked, ChatRequest):
        raise ApiError(400, "sessions go on by /v1/chat/completions", param="session_id")
    if named == asked.session_id:
        return asked
    if asked.session_id or asked.context_id:
        raise ApiError(400, f"the header {SESSION} and the body name two pasts", param="session_id")
    return asked.model_copy(update={"session_id": named})
