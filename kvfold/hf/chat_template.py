# SPDX-License-Identifier: Apache-2.0
"""The text around a document and a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvfold.errors import KvfoldError
from kvfold.hf.user_text import ids_of, segments

# Between a document and the question about it.
SEPARATOR = "\n\n"
NONCHARACTER = "\ufdd0"
# An invisible character, in a message's place
MARK = "\u2063"
# What a template raises that refuses messages, or cannot read them
REFUSALS = (TemplateError, TypeError)


@dataclass(frozen=True)
class PromptFrame:
    """Texts of a chat template before a user's message, and between it and the answer.

    `between` stands between an answer and the user's next message; None: the template has no such.
    `separator` separates a document from the question about it.
    """

    before: str
    after: str
    between: str | None
    separator: str = SEPARATOR

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> PromptFrame:
        """The tokenizer's chat template, or its first token and a line break where it has none.

        Raises KvfoldError for a template that does not show a user's message exactly once.
        """
        if not tokenizer.chat_template:
            return cls(tokenizer.bos_token or "", "\n", "\n\n")
        before, after = _around_user(tokenizer)
        try:
            turns = _around(tokenizer, "user", "assistant", "user")
        except REFUSALS:
            turns = []
        return cls(before, after, turns[2] if len(turns) == 4 else None)

    def opened_with(self, instruction: str) -> PromptFrame:
        """The same with an instruction before the document."""
        return replace(self, before=self.before + instruction)


def conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[tuple[str, str]]
) -> list[str]:
    """Segments of the chat template with messages `(role, text)`, up to where the answer begins.

    The template is given every text with a mark at each cut, so that whatever it does with them
    the cuts stay where they are. Raises KvfoldError if none of several templates is the default, or
    if it refuses the messages, as some do a system message.
    """
    mark = _absent_from("".join(text for _, text in messages))
    marked = [(role, mark.join(segments(tokenizer, text))) for role, text in messages]
    try:
        return _rendered(tokenizer, marked, _takes_parts(tokenizer)).split(mark)
    except REFUSALS as problem:
        roles = ", ".join(role for role, _ in messages)
        raise KvfoldError(f"the chat template refuses messages of {roles}: {problem}") from problem


def _around_user(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Texts of the chat template before a user's message and after it.

    Raises KvfoldError if it does not show the message exactly once.
    """
    try:
        pieces = _around(tokenizer, "user")
    except REFUSALS as problem:
        found = f"refuses a user's message ({problem})"
    else:
        if len(pieces) == 2:
            return pieces[0], pieces[1]
        found = f"shows a user's message {len(pieces) - 1} times"
    raise KvfoldError(
        f"the chat template {found}, so a document has no single place in it: set "
        "tokenizer.chat_template to one that shows each message once, or to None for none"
    )


def _around(tokenizer: PreTrainedTokenizerBase, *roles: str) -> list[str]:
    """Texts of the chat template before, between and after messages of these roles."""
    messages = [(role, MARK) for role in roles]
    return _rendered(tokenizer, messages, _takes_parts(tokenizer)).split(MARK)


def _takes_parts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the chat template shows a message only as a list of parts, as LLaVA's does."""
    return _times_shown(tokenizer, False) != 1 and _times_shown(tokenizer, True) == 1


def _times_shown(tokenizer: PreTrainedTokenizerBase, in_parts: bool) -> int:
    try:
        return _rendered(tokenizer, [("user", MARK)], in_parts).count(MARK)
    except REFUSALS:
        return 0


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[tuple[str, str]], in_parts: bool
) -> str:
    """The chat template with these messages, each as a text or as a list of one part.

    Raises KvfoldError if none of several templates is the default, and what the template raises.
    """
    templates: Any = tokenizer.chat_template
    if isinstance(templates, dict) and "default" not in templates:
        raise KvfoldError(
            f"the tokenizer has the chat templates {', '.join(templates)} and none named default: "
            f"choose one, as tokenizer.chat_template = tokenizer.chat_template[{min(templates)!r}]"
        )
    given: list[dict[str, Any]] = [
        {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}
        for role, text in messages
    ]
    return str(tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True))


def _absent_from(text: str) -> str:
    """A noncharacter, once or several times, that is not in the text."""
    mark = NONCHARACTER
    while mark in text:
        mark += NONCHARACTER
    return mark


def token_count(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Number of tokens of `text`, without special tokens of the tokenizer's own."""
    return len(tokenizer(text, add_special_tokens=False).input_ids)


def token_ids(tokenizer: PreTrainedTokenizerBase, *pieces: str) -> Tensor:
    """Ids `[1, N]` of the pieces joined, without special tokens of the tokenizer's own.

    Control tokens that a `Content` among them spells stay text; see `hf/user_text.py` for what is
    raised.
    """
    return torch.tensor([ids_of(tokenizer, *pieces)], dtype=torch.long)
