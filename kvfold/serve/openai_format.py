# SPDX-License-Identifier: Apache-2.0
"""Answers in OpenAI's JSON: complete, or as a stream of server-sent events."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import torch
from pydantic import BaseModel

from kvfold.serve.decoding import AnswerFinished, AnswerStarted, StrippedText
from kvfold.serve.errors import ApiError, out_of_memory
from kvfold.serve.events import event
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
from kvfold.serve.worker_threads import WorkerJob

DONE = "data: [DONE]\n\n"
log = logging.getLogger(__name__)


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


async def whole(job: WorkerJob, writer: ChatWriter) -> BaseModel:
    """The complete answer; raises what its generation raises."""
    text = ""
    while not isinstance(came := await job.next(), AnswerFinished):
        text += writer.strip(came)
    writer.counted(came)
    return writer.whole(text, came)


async def events(job: WorkerJob, writer: ChatWriter, with_usage: bool) -> AsyncIterator[str]:
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
