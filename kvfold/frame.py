# SPDX-License-Identifier: Apache-2.0
"""The text around a document and a question."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Frame:
    """What a chat template puts before a user's message, and between it and the answer."""

    before: str
    after: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Frame:
        """The tokenizer's chat template, or its first token and a line break where it has none."""
        if not tokenizer.chat_template:
            return cls(tokenizer.bos_token or "", "\n")
        mark = "\u2063"
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
        )
        before, after = str(text).split(mark)
        return cls(before, after)


def token_count(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """How many tokens `text` is as it stands."""
    return len(tokenizer(text, add_special_tokens=False).input_ids)


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """Ids `[1, N]` of `text` as it stands, without special tokens of the tokenizer's own."""
    ids: Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    return ids.long()
