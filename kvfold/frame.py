# SPDX-License-Identifier: Apache-2.0
"""The text around a document and a question."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedTokenizerBase

# Between a document and the question about it.
PARTING = "\n\n"


@dataclass(frozen=True)
class Frame:
    """What a chat template puts before a user's message, and between it and the answer.

    `between` stands between an answer and the user's next message; None: the template has no such.
    `parting` separates a document from the question about it.
    """

    before: str
    after: str
    between: str | None
    parting: str = PARTING

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Frame:
        """The tokenizer's chat template, or its first token and a line break where it has none."""
        if not tokenizer.chat_template:
            return cls(tokenizer.bos_token or "", "\n", "\n\n")
        before, after = _around(tokenizer, "user")
        turns = _around(tokenizer, "user", "assistant", "user")
        return cls(before, after, turns[2] if len(turns) == 4 else None)


def _around(tokenizer: PreTrainedTokenizerBase, *roles: str) -> list[str]:
    """What the chat template puts before, between and after messages of these roles."""
    mark = "\u2063"
    messages = [{"role": role, "content": mark} for role in roles]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(text).split(mark)


def token_count(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """How many tokens `text` is as it stands."""
    return len(tokenizer(text, add_special_tokens=False).input_ids)


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """Ids `[1, N]` of `text` as it stands, without special tokens of the tokenizer's own."""
    ids: Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    return ids.long()
