# SPDX-License-Identifier: Apache-2.0
"""What clients get: OpenAI's answers, whole and in pieces, and contexts.

Nothing in this module knows which engine answers.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Reason = Literal["stop", "length"]


class PromptDetails(BaseModel):
    """How much of a prompt was not read again, as a context holds it."""

    cached_tokens: int


class Usage(BaseModel):
    """What was counted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, prompt: int, cached: int, completion: int) -> Usage:
        """From three counts of tokens."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=cached),
        )


class ChatMessage(BaseModel):
    """An answer."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """The only choice of an answer."""

    index: int = 0
    message: ChatMessage
    logprobs: None = None
    finish_reason: Reason


class _Answer(BaseModel):
    id: str
    created: int
    model: str


class ChatCompletion(_Answer):
    """A whole answer to a conversation."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """What is new in a piece of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatDelta(BaseModel):
    """The only choice of a piece."""

    index: int = 0
    delta: Delta
    logprobs: None = None
    finish_reason: Reason | None = None


class ChatChunk(_Answer):
    """A piece of an answer to a conversation."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatDelta]
    usage: Usage | None = None


class TextChoice(BaseModel):
    """The only choice of a completion, or of a piece of one."""

    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: Reason | None = None


class Completion(_Answer):
    """A completion, or a piece of one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage | None = None


class Model(BaseModel):
    """A model that can be asked."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvfold"
    max_model_len: int | None


class ModelList(BaseModel):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]


class ContextInfo(BaseModel):
    """A held context. `kept` is the part of the entries, `bytes` what they take in memory."""

    id: str
    object: Literal["context"] = "context"
    created: int
    model: str
    method: str
    budget: str
    tokens: int
    kept: float
    bytes: int
    bytes_full: int
    place: Literal["memory", "disk"]
    readers: int


class ContextDetail(ContextInfo):
    """A held context, with the entries kept in each layer and KV head."""

    kept_per_layer: list[list[int]]


class ContextList(BaseModel):
    """`GET /v1/contexts`; `has_more`: others follow the last one."""

    object: Literal["list"] = "list"
    data: list[ContextInfo]
    has_more: bool


class ContextDeleted(BaseModel):
    """`DELETE /v1/contexts/{id}`."""

    id: str
    object: Literal["context.deleted"] = "context.deleted"
    deleted: Literal[True] = True


class Health(BaseModel):
    """`GET /health`, `GET /ready`."""

    status: Literal["ok", "ready"]


class ErrorDetail(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every refusal."""

    error: ErrorDetail = Field()
