# SPDX-License-Identifier: Apache-2.0
"""Request bodies: OpenAI's chat and completion requests for one answer, and new contexts.

An unknown field is refused by name, not ignored. The schemas hold for every engine.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

# Limits of lists other than prompts, and of strings other than texts for the model.
MOST_ENTRIES, MOST_CHARACTERS = 4096, 500
# Lower case: ids never collide on case-insensitive file systems. No dots or slashes: no paths.
CONTEXT_ID = r"^[a-z0-9][a-z0-9_-]{0,63}$"
# Header that names a session, for clients that cannot add fields.
SESSION = "x-kvfold-session"


def _of_whole_characters(text: str) -> str:
    """The text; raises ValueError for a lone surrogate, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half a character (a lone surrogate) is no text") from None
    return text


Text = Annotated[str, AfterValidator(_of_whole_characters)]
ContextId = Annotated[str, Field(pattern=CONTEXT_ID)]
# Values without effect: accepted, as some clients always send them.
Empty = Annotated[list[Any], Field(max_length=0)]
EmptyObject = Annotated[dict[str, Any], Field(max_length=0)]
Zero = Annotated[float, Field(ge=0, le=0)]
Name = Annotated[str, Field(max_length=MOST_CHARACTERS)]
MessageId = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
StopText = Annotated[str, Field(max_length=MOST_CHARACTERS), AfterValidator(_of_whole_characters)]
Stop = Annotated[list[StopText], Field(fail_fast=True, max_length=16)]
TokenBudget = Annotated[int, Field(gt=0, lt=2**53)]
RatioBudget = Annotated[float, Field(gt=0, le=1)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class TextPart(_Strict):
    """A text part of a message's content."""

    type: Literal["text"]
    text: Text


class RequestMessage(_Strict):
    """A message of a conversation; answers may be sent back with all their fields.

    Messages of tools are for sessions, where `tool_call_id` becomes their id. `name` and LiteLLM's
    `provider_specific_fields` are ignored.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=MOST_ENTRIES)]

    tool_call_id: MessageId | None = None
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
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class ResponseFormat(_Strict):
    """The format of an answer; text is the only one."""

    type: Literal["text"]


class AnswerRequest(_Strict):
    """Fields common to requests for an answer.

    `context_id` names the context that precedes the whole request. Without it, `prefix_cache` lets
    the request reuse a stored context that is a prefix of it. `top_k` 0 or -1: all tokens. `n`,
    `best_of`, OpenAI's penalties, `logprobs` and fields typed as None or empty accept their default
    only. `user`, `metadata` and other labels of the client are ignored. `usual_tokens` bounds an
    answer for which no length is given, as in OpenAI's API; None: the server's limit.
    """

    usual_tokens: ClassVar[int | None] = None

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.1, le=10)
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
        """True if a stream ends with its token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def most_tokens(self) -> int | None:
        """Tokens to generate at most; None if the request does not say."""
        return self.max_tokens


class ChatRequest(AnswerRequest):
    """`POST /v1/chat/completions`; with a `session_id`, the messages are appended to a session.

    `chat_template_kwargs` are arguments of the chat template; `reasoning_effort` is one of them.
    """

    session_id: ContextId | None = None
    messages: Annotated[
        list[RequestMessage], Field(fail_fast=True, min_length=1, max_length=MOST_ENTRIES)
    ]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Literal[False] | None = None
    top_logprobs: Zero | None = None
    response_format: ResponseFormat | None = None
    tools: Empty | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Empty | None = None
    function_call: Literal["none", "auto"] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    audio: None = None
    prediction: None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Name | None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    moderation: None = None

    @model_validator(mode="after")
    def _one_past(self) -> Self:
        if self.session_id is not None and self.context_id is not None:
            raise ValueError("give session_id or context_id, not both")
        return self

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give max_completion_tokens or max_tokens, not both")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens or self.max_completion_tokens

    @property
    def template(self) -> dict[str, Any] | None:
        """Arguments of the chat template; None: none given."""
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else None
        if self.chat_template_kwargs is None:
            return effort
        return (effort or {}) | self.chat_template_kwargs


class CompletionRequest(AnswerRequest):
    """`POST /v1/completions`: one prompt, text or token ids, plain or in a list of length one."""

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
        return self.prompt  # type: ignore[return-value]  # a list of ints, as its first is one


class ContextRequest(_Strict):
    """`POST /v1/contexts`: a text to compress, with `method` and `budget` as in `kvfold.compress`.

    A budget is a number of tokens, the ratio to keep (0.2, "20%"), or a size ("2GiB"), or a list of
    numbers, one for each compressed layer. `system` and `chat_template_kwargs` are `system` and
    `template` there.
    """

    text: Annotated[Text, Field(min_length=1)]
    id: ContextId | None = None
    method: Name | None = None
    budget: (
        TokenBudget
        | RatioBudget
        | Annotated[str, Field(max_length=50)]
        | Annotated[list[TokenBudget | RatioBudget], Field(min_length=1, max_length=MOST_ENTRIES)]
        | None
    ) = None
    system: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class SessionRequest(_Strict):
    """`POST /v1/sessions`: an agent's instructions, as in `kvfold.begin_session`."""

    text: Annotated[Text, Field(min_length=1)]
    id: ContextId | None = None
    method: Name | None = None
    budget: TokenBudget | None = None


class SessionEdits(_Strict):
    """`POST /v1/sessions/{id}/edits`: messages to drop, and shorter texts of others, by id."""

    drop: Annotated[list[MessageId], Field(fail_fast=True, max_length=MOST_ENTRIES)] = []
    shorten: Annotated[
        dict[MessageId, Annotated[Text, Field(min_length=1)]], Field(max_length=MOST_ENTRIES)
    ] = {}
    now: bool = False

    @model_validator(mode="after")
    def _something_once(self) -> Self:
        if not self.drop and not self.shorten:
            raise ValueError("name messages to drop or to shorten")
        if set(self.drop) & set(self.shorten):
            raise ValueError("a message is dropped or shortened, not both")
        return self
