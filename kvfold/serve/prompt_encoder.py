# SPDX-License-Identifier: Apache-2.0
"""Token ids of requests: after a context as `Chat` makes them, alone by the chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvfold.errors import KvfoldError
from kvfold.hf import user_text
from kvfold.hf.chat_template import SEPARATOR, PromptFrame, check_same, conversation
from kvfold.hf.template_arguments import check_spelled, json_arguments
from kvfold.serve.errors import ApiError, refusals
from kvfold.serve.request_schemas import RequestMessage

# Separator of segments in prefix keys: a byte that UTF-8 text never has.
KEY_SEPARATOR = b"\xff"
# An invisible character, around a message's index.
MARK = "\u2063"
# Roles that chat templates know by another name: OpenAI renamed "system".
NAMES_IN_TEMPLATES = {"developer": "system"}


@dataclass(frozen=True)
class PromptEncoder:
    """Conversion of clients' texts to token ids, for a model of `vocabulary` tokens.

    A text is handled as segments (`hf/user_text.py`), so that special tokens a client spells stay
    text, unless `special_tokens`. A text of more than `most` tokens (None: no limit) is refused,
    before the slow tokenisation if a lower bound of its tokens is above `most` already.
    `check_wanted` is called before each segment and may raise to end the work.
    """

    tokenizer: PreTrainedTokenizerBase
    frame: PromptFrame
    vocabulary: int
    special_tokens: bool = False
    most: int | None = None
    check_wanted: Callable[[], None] = lambda: None

    @cached_property
    def _longest(self) -> int | None:
        return user_text.longest_token(self.tokenizer)

    def client_text(self, text: str) -> str:
        """A client's text, marked so that its special tokens stay text unless allowed."""
        return user_text.content(text, self.special_tokens)

    def split(self, *pieces: str) -> list[str]:
        """Segments of pieces of a prompt; clients' texts among them went through `client_text`."""
        return user_text.segments(self.tokenizer, *pieces)

    def ids(self, parts: Sequence[str]) -> list[int]:
        """Token ids of segments, without a template.

        Raises ApiError for special tokens that cannot be kept as text, and for a text that is
        certainly longer than `most`.
        """
        self.check_length(user_text.least_tokens(parts, self._longest), "at least ")
        if self.special_tokens:
            tokens: list[int] = self.tokenizer("".join(parts), add_special_tokens=False).input_ids
            return tokens
        with refusals(code="special_tokens"):
            return user_text.segment_ids(self.tokenizer, self._while_wanted(parts))

    def check_length(self, tokens: int, told: str = "") -> None:
        """Raises ApiError for more `tokens` than `most`; `told` precedes their number."""
        if self.most is not None and tokens > self.most:
            raise ApiError(
                400,
                f"the text has {told}{tokens} tokens, and the server takes {self.most}",
                code="context_length_exceeded",
            )

    def _while_wanted(self, parts: Iterable[str]) -> Iterator[str]:
        for part in parts:
            self.check_wanted()
            yield part

    def turns(
        self,
        messages: Sequence[RequestMessage],
        frame: PromptFrame,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[list[int]]:
        """Token ids after a context's document, turn by turn, the last question last, as in `Chat`.

        Raises ApiError for another system message, or other `arguments` of the chat template, than
        the context's; for roles that do not alternate from the user's on, for a chat template
        without a second turn, for texts that are too long, and for a question without tokens.
        """
        system = None
        if messages[0].role in ("system", "developer"):
            system, messages = messages[0].text, messages[1:]
        with refusals(param="messages"):
            check_same(self.tokenizer, frame, system, None)
        with refusals(param="chat_template_kwargs"):
            check_same(self.tokenizer, frame, None, arguments)
        expected = ["user", "assistant"] * (len(messages) // 2) + ["user"]
        if [message.role for message in messages] != expected:
            raise ApiError(
                400,
                "a context is the opening of a user's message: after it come a question, and any "
                "number of answers and further questions; a system message is the context's own, "
                "first",
                param="messages",
            )
        if len(messages) > 1 and frame.between is None:
            raise ApiError(400, "the model's chat template has no second turn", param="messages")
        split: list[list[str]] = []
        for index, message in enumerate(messages):
            text = self.client_text(message.text)
            if message.role == "assistant":
                shown = frame.earlier(self.tokenizer, message.text)
                split.append(self.split(self.client_text(shown)))
            else:
                opening = frame.between if index else SEPARATOR
                assert opening is not None
                earlier = frame.answered is not None and index < len(messages) - 1
                after = frame.answered if earlier else frame.after
                split.append(self.split(opening, text, after or ""))
        least = user_text.least_tokens(chain.from_iterable(split), self._longest)
        self.check_length(least, "at least ")
        ids = [self.ids(parts) for parts in split]
        if not ids[-1]:
            raise ApiError(400, "the last message is empty: ask something", param="messages")
        # An answer ends the turn of the question before it.
        return [list(chain(*ids[at : at + 2])) for at in range(0, len(ids), 2)]

    def arguments(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Checked arguments of the chat template; raises ApiError for those it does not take."""
        if not given:
            return {}
        with refusals(param="chat_template_kwargs"):
            if not self.tokenizer.chat_template:
                raise KvfoldError("the model has no chat template: leave its arguments out")
            made = json_arguments(self.tokenizer, given)
            if not self.special_tokens:
                check_spelled(self.tokenizer, None, made)
            return made

    def conversation(
        self, messages: Sequence[RequestMessage], template: Mapping[str, Any] | None = None
    ) -> list[str]:
        """Segments of a conversation without a context, up to where the answer begins.

        Raises ApiError for messages of tools, if the chat template refuses it or drops one, and as
        `arguments` for those of the template.
        """
        given = self.arguments(template)
        if any(message.role == "tool" for message in messages):
            raise ApiError(
                400, "messages of tools are for sessions: name one as session_id", param="messages"
            )
        if not self.tokenizer.chat_template:
            first, *others = messages
            if first.role != "user" or others:
                raise ApiError(
                    400,
                    "the model has no chat template: it takes a single user's message",
                    param="messages",
                )
            return self.split(self.frame.before, self.client_text(first.text), self.frame.after)
        roles = [NAMES_IN_TEMPLATES.get(message.role, message.role) for message in messages]
        texts = [self.client_text(message.text) for message in messages]
        with refusals(param="messages"):
            parts = conversation(self.tokenizer, list(zip(roles, texts, strict=True)), given)
            dropped = _dropped(self.tokenizer, roles, given)
        for index in dropped:
            if texts[index].strip():
                raise ApiError(
                    400,
                    f"the model's chat template drops messages of role {messages[index].role!r}: "
                    f"leave out message {index + 1}, or say it in a user's message",
                    param="messages",
                )
        return parts

    def prompt(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a completion's prompt, with the special tokens that the tokenizer adds."""
        if isinstance(prompt, list):
            return self.checked_ids(prompt)
        bos = self.tokenizer.bos_token
        if self.special_tokens and bos and prompt.startswith(bos):
            return self.ids([prompt])
        before, after = user_text.own_tokens(self.tokenizer)
        return [*before, *self.ids(self.split(self.client_text(prompt))), *after]

    def continuation(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a completion's prompt after a context; raises ApiError for none."""
        if isinstance(prompt, str):
            tokens = self.ids(self.split(self.client_text(prompt)))
        else:
            tokens = self.checked_ids(prompt)
        if not tokens:
            raise ApiError(400, "the prompt is empty", param="prompt")
        return tokens

    def checked_ids(self, tokens: list[int]) -> list[int]:
        """Token ids sent by a client; raises ApiError for one beyond the vocabulary."""
        if max(tokens, default=0) >= self.vocabulary:
            raise ApiError(400, f"there is no token {max(tokens)}", param="prompt")
        return tokens


def _dropped(
    tokenizer: PreTrainedTokenizerBase, roles: Sequence[str], arguments: Mapping[str, Any]
) -> list[int]:
    """Indices of the messages that the chat template drops from a conversation of `roles`.

    Found with short texts in their place: a template may shorten texts (answers without their
    reasoning), which drops none.
    """
    marked = [(role, f"{MARK}{index}{MARK}") for index, role in enumerate(roles)]
    whole = "".join(conversation(tokenizer, marked, arguments))
    shown = {int(index) for index in re.findall(f"{MARK}([0-9]+){MARK}", whole)}
    return [index for index in range(len(roles)) if index not in shown]


def key_bytes(parts: Sequence[str]) -> bytes:
    """Segments as bytes: the key of a prefix of a text is a prefix of the text's key."""
    return KEY_SEPARATOR.join(part.encode() for part in parts)


def segments_of(data: bytes) -> list[str]:
    """The segments of `key_bytes`."""
    return [part.decode() for part in data.split(KEY_SEPARATOR)]
