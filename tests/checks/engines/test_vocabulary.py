# SPDX-License-Identifier: Apache-2.0
"""Tokens by their bytes, of a vocabulary of bytes and of SentencePiece's."""

from __future__ import annotations

from typing import Any

from kvfold.checks.engines.vocabulary import tokens_by_bytes


class Vocabulary:
    """A tokenizer of these tokens and texts."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.texts)}

    def decode(self, ids: list[int], **_: Any) -> str:
        return [*self.texts.values()][ids[0]]


def test_characters_that_stand_for_bytes_are_those_bytes() -> None:
    found = tokens_by_bytes(Vocabulary({"Ġ": " ", "Ġcat": " cat", "Ã": "�", "<|é|>": "<|é|>"}))  # type: ignore[arg-type]
    assert found[b" cat"] == [1] and found[b"\xc3"] == [2] and found["�".encode()] == [2]
    assert "<|é|>".encode() in found


def test_both_ways_of_showing_a_sentencepiece_token_lead_to_it() -> None:
    found = tokens_by_bytes(Vocabulary({"▁The": "The", "The": "The", "<0xE4>": "�"}))  # type: ignore[arg-type]
    assert found[b"The"] == [0, 1] and found[b" The"] == [0] and found[b"\xe4"] == [2]
