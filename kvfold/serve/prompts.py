# SPDX-License-Identifier: Apache-2.0
"""How requests become tokens: inside a context as `Chat` does, alone as the chat template does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from kvfold.frame import PARTING, Frame
from kvfold.serve.errors import ApiError
from kvfold.serve.requests import Message

# What `Chat` puts between a document and the first question.


@dataclass(frozen=True)
class Prompts:
    """Texts and tokens of one tokenizer, for a model that knows `vocabulary` of them."""

    tokenizer: PreTrainedTokenizerBase
    frame: Frame
    vocabulary: int

    def ids(self, text: str) -> list[int]:
        """Tokens of a text as it stands."""
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return tokens

    def turns(self, messages: Sequence[Message], frame: Frame) -> list[int]:
        """What follows a context's document: questions and answers, as `Chat` reads them."""
        expected = ["user", "assistant"] * (len(messages) // 2) + ["user"]
        if [message.role for message in messages] != expected:
            raise ApiError(
                400,
                "a context is the opening of a user's message: after it come a question, and any "
                "number of answers and further questions, without a system message",
                param="messages",
            )
        if len(messages) > 1 and frame.between is None:
            raise ApiError(400, "the model's chat template has no second turn", param="messages")
        tokens: list[int] = []
        for index, message in enumerate(messages):
            if message.role == "assistant":
                tokens += self.ids(message.text)
            else:
                opening = frame.between if index else PARTING
                tokens += self.ids(f"{opening}{message.text}{frame.after}")
        return tokens

    def conversation(self, messages: Sequence[Message]) -> str:
        """A conversation that stands alone, and where its answer begins."""
        if not self.tokenizer.chat_template:
            first, *others = messages
            if first.role != "user" or others:
                raise ApiError(
                    400,
                    "the model has no chat template: it takes a single user's message",
                    param="messages",
                )
            return f"{self.frame.before}{first.text}{self.frame.after}"
        plain = [{"role": message.role, "content": message.text} for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as problem:
            raise ApiError(400, f"the chat template refuses: {problem}", param="messages") from None
        return str(text)

    def prompt(self, prompt: str | list[int]) -> list[int]:
        """Tokens of a completion's prompt that stands alone, with the tokenizer's own before it."""
        if isinstance(prompt, list):
            return self.checked(prompt)
        begun = self.tokenizer.bos_token and prompt.startswith(self.tokenizer.bos_token)
        tokens: list[int] = self.tokenizer(prompt, add_special_tokens=not begun).input_ids
        return tokens

    def checked(self, tokens: list[int]) -> list[int]:
        """Tokens of a client's own making; raises ApiError for one that the model has not."""
        if max(tokens, default=0) >= self.vocabulary:
            raise ApiError(400, f"there is no token {max(tokens)}", param="prompt")
        return tokens
