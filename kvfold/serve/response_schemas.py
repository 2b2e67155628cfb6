# SPDX-License-Identifier: Apache-2.0
"""Response bodies: OpenAI's answers, complete and as chunks of a stream, and contexts.

The schemas hold for every engine.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Reason = Literal["stop", "length"]


class PromptDetails(BaseModel):
    """Prompt tokens that a stored context holds, so that they were not read again."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, prompt: int, cached: int, completion: int) -> Usage:
        """From the tokens of the prompt, those of them in a context, and those generated."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=cached),
        )


class ChatMessage(BaseModel):
    """The message of an answer."""

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
    """A complete answer to a conversation."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """New text in a chunk of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    """The only choice of a chunk."""

    index: int = 0
    delta: ChatDelta
    logprobs: None = None
    finish_reason: Reason | None = None


class ChatChunk(_Answer):
    """A chunk of a streamed answer to a conversation."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | None = None


class TextChoice(BaseModel):
    """The only choice of a completion or of its chunk."""

    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: Reason | None = None


class Completion(_Answer):
    """A completion, or a chunk of a streamed one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage | None = None


class ModelInfo(BaseModel):
    """The served model; `max_model_len` bounds prompt and answer together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvfold"
    max_model_len: int | None


class ModelList(BaseModel):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelInfo]


class ColdInfo(BaseModel):
    """Bytes of cold entries of recall: in memory, as a part of `bytes`, and in the file."""

    host: int
    filed: int


class StoredInfo(BaseModel):
    """A context or session that the server holds by id; `bytes`: its size in memory."""

    id: str
    created: int
    model: str
    method: str
    budget: str
    tokens: int
    bytes: int
    bytes_full: int
    cold: ColdInfo
    place: Literal["memory", "disk"]


class ContextInfo(StoredInfo):
    """A stored context; `kept`: fraction of entries kept."""

    object: Literal["context"] = "context"
    kept: float
    readers: int


class ContextDetail(ContextInfo):
    """A stored context, with the entries kept per layer and KV head."""

    kept_per_layer: list[list[int]]


class ContextList(BaseModel):
    """`GET /v1/contexts`; `has_more`: true if more contexts follow the last one."""

    object: Literal["list"] = "list"
    data: list[ContextInfo]
    has_more: bool


class ContextDeleted(BaseModel):
    """`DELETE /v1/contexts/{id}`."""

    id: str
    object: Literal["context.deleted"] = "context.deleted"
    deleted: Literal[True] = True


class SessionMessage(BaseModel):
    """A message of a session; `queued`: its edit waits."""

    id: str
    role: Literal["user", "tool", "assistant"]
    tokens: int
    queued: bool


class SessionInfo(StoredInfo):
    """A session; `entries`: kept per KV head on average."""

    object: Literal["session"] = "session"
    entries: float
    in_use: bool
    turns: int
    compactions: int


class SessionDetail(SessionInfo):
    """A session, with its messages in order."""

    messages: list[SessionMessage]


class SessionList(BaseModel):
    """`GET /v1/sessions`; `has_more`: true if more sessions follow the last one."""

    object: Literal["list"] = "list"
    data: list[SessionInfo]
    has_more: bool


class SessionDeleted(BaseModel):
    """`DELETE /v1/sessions/{id}`."""

    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: Literal[True] = True


class Health(BaseModel):
    """`GET /health`, `GET /ready`."""

    status: Literal["ok", "ready"]


class ErrorDetail(BaseModel):
    """Message, type, parameter and code of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error answer."""

    error: ErrorDetail = Field()
