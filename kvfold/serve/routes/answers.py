# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions` and `/v1/completions`: answers in OpenAI's JSON, whole or as a stream."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import torch
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request

from kvfold.serve.bodies import ThreadParsedRoute
from kvfold.serve.engine import Engine
from kvfold.serve.errors import ApiError, out_of_memory
from kvfold.serve.events import AT_ONCE, EVENTS, ClosedStream, event
from kvfold.serve.metrics import ServerMetrics
from kvfold.serve.request_schemas import SESSION, ChatRequest, CompletionRequest
from kvfold.serve.response_schemas import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChunkChoice,
    Completion,
    TextChoice,
    Usage,
)
from kvfold.serve.served_model import AnswerFinished, AnswerStarted
from kvfold.serve.worker_threads import RequestJob

DONE = "data: [DONE]\n\n"
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {EVENTS: {"schema": {"type": "string"}}}}
}
log = logging.getLogger(__name__)


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


class ChatWriter:
    """JSON of one answer to a conversation; `counted` is called with its last event."""

    prefix, strips = "chatcmpl", True

    def __init__(
        self, model: str, started: AnswerStarted, counted: Callable[[AnswerFinished], None]
    ) -> None:
        self.started, self.counted = started, counted
        self.strip = StrippedText().of if self.strips else str
        self.about: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, done: AnswerFinished) -> BaseModel:
        """The complete answer."""
        choice = ChatChoice(message=ChatMessage(content=text), finish_reason=done.reason)
        return ChatCompletion(**self.about, choices=[choice], usage=self.usage(done))

    def first(self) -> list[BaseModel]:
        """Chunks before the first text: the role."""
        return [self._chunk(ChatDelta(role="assistant", content=""))]

    def piece(self, text: str) -> BaseModel:
        """A chunk with a piece of text."""
        return self._chunk(ChatDelta(content=text))

    def last(self, done: AnswerFinished) -> BaseModel:
        """The chunk with the finish reason."""
        return self._chunk(ChatDelta(), done)

    def only_usage(self, done: AnswerFinished) -> BaseModel:
        """The chunk with the token counts."""
        return ChatChunk(**self.about, choices=[], usage=self.usage(done))

    def usage(self, done: AnswerFinished) -> Usage:
        """Token counts of prompt and answer."""
        return Usage.of(self.started.prompt, self.started.cached, done.tokens)

    def _chunk(self, delta: ChatDelta, done: AnswerFinished | None = None) -> BaseModel:
        choice = ChunkChoice(delta=delta, finish_reason=None if done is None else done.reason)
        return ChatChunk(**self.about, choices=[choice])


class CompletionWriter(ChatWriter):
    """JSON of a completion; its white space is kept, as the text continues the prompt's."""

    prefix, strips = "cmpl", False

    def whole(self, text: str, done: AnswerFinished) -> BaseModel:
        choice = TextChoice(text=text, finish_reason=done.reason)
        return Completion(**self.about, choices=[choice], usage=self.usage(done))

    def first(self) -> list[BaseModel]:
        return []

    def piece(self, text: str) -> BaseModel:
        return Completion(**self.about, choices=[TextChoice(text=text)])

    def last(self, done: AnswerFinished) -> BaseModel:
        choice = TextChoice(text="", finish_reason=done.reason)
        return Completion(**self.about, choices=[choice])

    def only_usage(self, done: AnswerFinished) -> BaseModel:
        return Completion(**self.about, choices=[], usage=self.usage(done))


class StrippedText:
    """Strips white space from both ends of a text that comes in pieces, as `Context.ask` does."""

    def __init__(self) -> None:
        self._begun, self._held = False, ""

    def of(self, piece: str) -> str:
        """Text to send after this piece; white space at its end waits for the next one."""
        text = self._held + piece
        if not self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._begun |= bool(shown)
        self._held = text[len(shown) :]
        return shown


async def whole(job: RequestJob, writer: ChatWriter) -> BaseModel:
    """The complete answer; raises what its generation raises."""
    text = ""
    while not isinstance(came := await job.next(), AnswerFinished):
        text += writer.strip(came)
    writer.counted(came)
    return writer.whole(text, came)


async def events(job: RequestJob, writer: ChatWriter, with_usage: bool) -> AsyncIterator[str]:
    """Server-sent events of an answer; closing the iterator ends its generation."""
    try:
        for chunk in writer.first():
            yield _event(chunk, with_usage)
        while not isinstance(came := await job.next(), AnswerFinished):
            if text := writer.strip(came):
                yield _event(writer.piece(text), with_usage)
        writer.counted(came)
        yield _event(writer.last(came), with_usage)
        if with_usage:
            yield _event(writer.only_usage(came), with_usage)
        yield DONE
    except ApiError as refused:
        yield event(refused.body())
    except torch.OutOfMemoryError as problem:
        yield event(out_of_memory(problem).body())
    except Exception:
        log.exception("an answer failed half-way")
        yield event(ApiError(500, "the server failed: see its log").body())
    finally:
        job.close()


def _event(chunk: BaseModel, with_usage: bool) -> str:
    """A chunk as a server-sent event, with `usage: null` if the counts follow at the end."""
    left_out = set() if with_usage or getattr(chunk, "usage", None) else {"usage"}
    content = chunk.model_dump(mode="json", exclude=left_out)
    for choice in content["choices"]:
        if "delta" in choice:
            choice["delta"] = {k: v for k, v in choice["delta"].items() if v is not None}
    return event(content)
