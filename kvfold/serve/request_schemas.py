# SPDX-License-Identifier: Apache-2.0
"""What clients send: OpenAI's requests as far as one answer needs them, and contexts.

What is not here is refused by its name instead of being left out silently. Nothing in this module
knows which engine answers.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

# Entries of a list that is no prompt, and characters of what is no text to read.
MOST_ENTRIES, MOST_CHARACTERS = 4096, 500
# Lower case, so that two contexts are never one file; no dots or slashes, so that none is a path.
CONTEXT_ID = r"^[a-z0-9][a-z0-9_-]{0,63}$"


def _of_whole_characters(text: str) -> str:
    """JSON can carry halves of characters, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half a character (a lone surrogate) is no text") from None
    return text


Text = Annotated[str, AfterValidator(_of_whole_characters)]
ContextId = Annotated[str, Field(pattern=CONTEXT_ID)]
# What asks for nothing.
Empty = Annotated[list[Any], Field(max_length=0)]
EmptyObject = Annotated[dict[str, Any], Field(max_length=0)]
Zero = Annotated[float, Field(ge=0, le=0)]
Name = Annotated[str, Field(max_length=MOST_CHARACTERS)]
StopText = Annotated[str, Field(max_length=MOST_CHARACTERS), AfterValidator(_of_whole_characters)]
Stop = Annotated[list[StopText], Field(fail_fast=True, max_length=16)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class Message(_Strict):
    """A message of a conversation; clients send answers back with all their fields.

    Nothing is read of `name` and of what LiteLLM adds.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=MOST_ENTRIES)]

    name: Name | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Empty | None = None
    annotations: Empty | None = None
    provider_specific_fields: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(_Strict):
    """What a stream tells beside the answer."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class ResponseFormat(_Strict):
    """The form of an answer: a text, as every answer has."""

    type: Literal["text"]


class Request(_Strict):
    """What requests for an answer have in common.

    `context_id` names a context that comes before all of the request; without one,
    `prefix_cache` lets the request use a held context that it begins with. `n`, `best_of`, the
    penalties, `logprobs` and all that may only be None or empty can only be what they are by
    default; `user`, `metadata` and other names of the client's own are not looked at. An answer
    whose length is not given has at most `usual_tokens`, as OpenAI's; None: all it may have.
    """

    usual_tokens: ClassVar[int | None] = None

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopText | Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    context_id: ContextId | None = None
    prefix_cache: bool = True
    n: Literal[1] | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: EmptyObject | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _only_streams_have_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream ends with what was counted."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def most_tokens(self) -> int | None:
        """How long the answer may be, where the request says it."""
        return self.max_tokens


class ChatRequest(Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_ENTRIES)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Literal[False] | None = None
    top_logprobs: Zero | None = None
    response_format: ResponseFormat | None = None
    tools: Empty | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Empty | None = None
    function_call: Literal["none", "auto"] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give max_completion_tokens or max_tokens, not both")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens or self.max_completion_tokens


class CompletionRequest(Request):
    """`POST /v1/completions`: a prompt as text or as tokens, alone or the only one of a list."""

    usual_tokens: ClassVar[int | None] = 16

    prompt: (
        Text
        | Tokens
        | Annotated[list[Text | Tokens], Field(fail_fast=True, min_length=1, max_length=1)]
    )
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    logprobs: None = None

    @property
    def text_or_tokens(self) -> str | list[int]:
        """The prompt."""
        if isinstance(self.prompt, str):
            return self.prompt
        first = self.prompt[0] if self.prompt else None
        if isinstance(first, str | list):
            return first
        return self.prompt  # type: ignore[return-value]  # whole numbers, as the first is


class ContextRequest(_Strict):
    """`POST /v1/contexts`: `method` and `budget` are as for `kvfold.compress`.

    A budget is a number of tokens, the part to keep (0.2, "20%"), or a size ("2GiB").
    """

    text: Annotated[Text, Field(min_length=1)]
    id: ContextId | None = None
    method: Name | None = None
    budget: (
        Annotated[int, Field(gt=0, lt=2**53)]
        | Annotated[float, Field(gt=0, le=1)]
        | Annotated[str, Field(max_length=50)]
        | None
    ) = None
