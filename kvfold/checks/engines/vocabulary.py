# SPDX-License-Identifier: Apache-2.0
"""A tokenizer's tokens by the bytes in which endpoints show them."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPACE = "▁"  # stands for a space in vocabularies of SentencePiece
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of one byte there
BYTE_LEVEL_SPACE = "Ġ"  # is in every vocabulary whose characters stand for bytes


def tokens_by_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[bytes, list[int]]:
    """Ids by bytes: those of a token's text, as vLLM shows it, and its own, as llama.cpp does."""
    vocabulary = tokenizer.get_vocab()
    byte_of = {}
    if BYTE_LEVEL_SPACE in vocabulary:
        byte_of = {character: value for value, character in bytes_to_unicode().items()}
    found: dict[bytes, list[int]] = {}
    for token, number in vocabulary.items():
        text = str(tokenizer.decode([number], clean_up_tokenization_spaces=False))
        for shown in {text.encode(errors="replace"), _own_bytes(token, byte_of)}:
            found.setdefault(shown, []).append(number)
    return found


def _own_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    """The bytes that a token of a vocabulary stands for; `byte_of` is empty for SentencePiece's."""
    if byte_of:
        own = [byte_of.get(character) for character in token]
        known = [byte for byte in own if byte is not None]
        return bytes(known) if len(known) == len(own) else token.encode()
    byte = BYTE.fullmatch(token)
    return token.replace(SPACE, " ").encode() if byte is None else bytes([int(byte[1], 16)])
