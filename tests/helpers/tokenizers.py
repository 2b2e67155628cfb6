# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of a few words, and a tiny model that reads them."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["the", "grass", "is", "green", "sky", "blue", "here", "we", "go"]
PROMPT = " ".join(WORDS * 8)
SPECIAL = ["<pad>", "<bos>", "<unk>"]


def word_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", unk_token="<unk>"
    )


def cleaning_tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    """Tokenizers whose text of a token may change with those that follow.

    `words`, `pieces` and `letters` (WordLevel, WordPiece, BPE) clean up spaces before punctuation;
    in `bytes` a byte that is no UTF-8 makes all bytes beside it unreadable.
    """
    marks = [".", "?", "!", ",", "'", "n't", "'m", "'s", "'ve", "'re", "n", "t", "m", "ve"]
    pieces = [f"##{mark}" for mark in (*marks, "ing")]
    letters = [*"doisntmverya.?!,'", "Ġ", *(f"Ġ{mark}" for mark in marks), "Ã", "©", "â", "¬"]
    raw = [f"<0x{byte:02X}>" for byte in (0xE4, 0xBD, 0xA0, 0xC3, 0xA9, 0x41, 0xFF)]
    bpe = models.BPE(_numbered(letters), [], unk_token="<unk>")
    fallback = models.BPE(
        _numbered(["▁", "▁we", "go", ".", *raw]), [], unk_token="<unk>", byte_fallback=True
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made = {
        "words": (models.WordLevel(_numbered(WORDS + marks), unk_token="<unk>"), None),
        "pieces": (
            models.WordPiece(_numbered(WORDS + marks + pieces), unk_token="<unk>"),
            decoders.WordPiece(cleanup=False),
        ),
        "letters": (bpe, decoders.ByteLevel()),
        "bytes": (fallback, decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])),
    }
    return {name: _cleaning(*parts, name != "bytes") for name, parts in made.items()}


def _numbered(words: list[str]) -> dict[str, int]:
    return {word: i for i, word in enumerate(dict.fromkeys(SPECIAL + words))}


def _cleaning(model: Any, decoder: Any, cleans: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        tokenizer.decoder = decoder
    if not cleans:
        tokenizer.add_special_tokens(["<|turn|>"])  # without a name, as "<|im_start|>" is
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=cleans,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=cleans,
    )


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL + WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)
