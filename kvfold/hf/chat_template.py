# SPDX-License-Identifier: Apache-2.0
"""The text around a document and a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvfold.hf.user_text import ids_of, segments

# Between a document and the question about it.
SEPARATOR = "\n\n"
NONCHARACTER = "\ufdd0"


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
        """The tokenizer's chat template, or its first token and a line break where it has none."""
        if not tokenizer.chat_template:
            return cls(tokenizer.bos_token or "", "\n", "\n\n")
        before, after = _around(tokenizer, "user")
        turns = _around(tokenizer, "user", "assistant", "user")
        return cls(before, after, turns[2] if len(turns) == 4 else None)

    def opened_with(self, instruction: str) -> PromptFrame:
        """The same with an instruction before the document."""
        return replace(self, before=self.before + instruction)


def _around(tokenizer: PreTrainedTokenizerBase, *roles: str) -> list[str]:
    """Texts of the chat template before, between and after messages of these roles."""
    mark = "\u2063"
    messages = [{"role": role, "content": mark} for role in roles]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(text).split(mark)


def conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[tuple[str, str]]
) -> list[str]:
    """Segments of the chat template with messages `(role, text)`, up to where the answer begins.

    The template is given every text with a mark at each cut, so that whatever it does with them
    the cuts stay where they are.
    """
    mark = _absent_from("".join(text for _, text in messages))
    marked = [
        {"role": role, "content": mark.join(segments(tokenizer, text))} for role, text in messages
    ]
    whole = tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True)
    return str(whole).split(mark)


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
