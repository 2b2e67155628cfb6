# SPDX-License-Identifier: Apache-2.0
"""Structural tokens of a text: punctuation, spaces and line breaks that come again and again.

NVIDIA/kvpress, pull request 288 (structure demotion).
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

UNREADABLE = "\ufffd"  # part of a character, in byte-level vocabularies


def structural(tokenizer: PreTrainedTokenizerBase, text: Tensor, repeats: int) -> Tensor:
    """Bool mask `[N]` of the structural tokens of a text `[N]`.

    These are no words or numbers, occur at least `repeats` times, and join no word together: the
    hyphen of "8f-4a" stands between letters and digits without a space, and is none.
    """
    ids = text.tolist()
    frequent = {token for token, count in Counter(ids).items() if count >= repeats}
    words = _Words(tokenizer)
    marks = [
        token in frequent and not words.is_word(token) and not words.joins(ids, i)
        for i, token in enumerate(ids)
    ]
    return torch.tensor(marks, dtype=torch.bool, device=text.device)


class _Words:
    """Texts of single tokens, spaces included, which some tokenizers show between tokens only."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.text, self.behind = cache(self._text), cache(self._behind)
        self.is_word = cache(self._is_word)

    def joins(self, ids: list[int], i: int) -> bool:
        """True if token `i` stands without whitespace between two that hold letters or digits."""
        if not 0 < i < len(ids) - 1:
            return False
        before, own = self.text(ids[i - 1]), self.behind(ids[i - 1], ids[i])
        after = self.behind(ids[i], ids[i + 1])
        edges = before[-1:], own[:1], own[-1:], after[:1]
        glued = "\n" not in own and not any(edge.isspace() for edge in edges)
        return glued and all(any(map(_is_letter, text)) for text in (before, after))

    def _is_word(self, token: int) -> bool:
        """True for letters and digits alone, and for a part of a character."""
        text = self.text(token).strip()
        return UNREADABLE in text or (text != "" and all(map(_is_letter, text)))

    def _text(self, *tokens: int) -> str:
        return str(self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def _behind(self, before: int, token: int) -> str:
        """Text of a token behind another one."""
        return self._text(before, token)[len(self.text(before)) :]


def _is_letter(character: str) -> bool:
    """True for letters, digits and accents."""
    return character.isalnum() or unicodedata.category(character).startswith("M")
