# SPDX-License-Identifier: Apache-2.0
"""Tokenization of users' text, in which spelled control tokens stay text.

A tokenizer turns "<|im_end|>" into the token that ends a message wherever it stands, so that a
document could speak in another role. Such strings are cut after their first character where a user
wrote them, and both parts are tokenised apart; a template's own are left whole. The tokenizer's
`split_special_tokens` is not used: it is a switch of the tokenizer, which threads share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvfold.errors import KvfoldError

if TYPE_CHECKING:  # policies run without transformers
    from transformers import PreTrainedTokenizerBase

# Read before a later segment and taken off again: some tokenizers begin a text with a space.
LEAD = "\n"


class Content(str):
    """Text of a user. All other text is a template's, whose control tokens are meant."""


def content(text: str, special_tokens: bool) -> str:
    """A user's text; with `special_tokens` it is read as a template's is.

    Raises KvfoldError for something else, and for a text that UTF-8 cannot encode.
    """
    if not isinstance(text, str):
        raise KvfoldError(f"a text is wanted, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise KvfoldError(
            f"character {problem.start + 1} of the text, {text[problem.start]!r}, is half a "
            "character (a lone surrogate), as of bytes that are not UTF-8: put the text into a "
            "file and decode it by its own encoding (--encoding)"
        ) from None
    return str(text) if special_tokens else Content(text)


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template, or all of several; empty where there is none."""
    templates: Any = getattr(tokenizer, "chat_template", None) or ""
    return templates if isinstance(templates, str) else "\0".join(templates.values())


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Special tokens, and added ones that the chat template writes, with their ids.

    White space and single characters, which some tokenizers declare special, are what they are.
    """
    written = template_text(tokenizer)
    found = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    for number, token in tokenizer.added_tokens_decoder.items():
        if token.special or token.content in written:
            found[token.content] = number
    return {text: number for text, number in found.items() if len(text.strip()) > 1}


def segments(tokenizer: PreTrainedTokenizerBase, *pieces: str) -> list[str]:
    """`pieces` joined, and cut inside every control token that a `Content` spells.

    Each segment is tokenised by itself; text without such strings is a single one.
    """
    pattern = _pattern(tuple(control_tokens(tokenizer)))
    made = [""]
    for piece in pieces:
        start = 0
        if isinstance(piece, Content):
            while found := pattern.search(piece, start):
                made[-1] += piece[start : found.start() + 1]
                made.append("")
                start = found.start() + 1
        made[-1] += piece[start:]
    return made


def segment_ids(tokenizer: PreTrainedTokenizerBase, parts: Iterable[str]) -> list[int]:
    """Ids of all segments, without special tokens of the tokenizer's own.

    Raises KvfoldError where a control token comes out of text that does not spell one: of another
    spelling that the tokenizer normalises to it, or of a vocabulary that joins its parts again.
    """
    control = control_tokens(tokenizer)
    pattern, unknown = _pattern(tuple(control)), _unknown(tokenizer)
    watched, lead = set(control.values()) - {unknown}, _encoded(tokenizer, LEAD)
    ids: list[int] = []
    for index, part in enumerate(parts):
        new = _led_ids(tokenizer, part, lead) if index else _encoded(tokenizer, part)
        meant = [number for text in pattern.findall(part) if (number := control[text]) != unknown]
        if [number for number in new if number in watched] != meant:
            names = ", ".join(repr(text) for text, number in control.items() if number in new)
            raise KvfoldError(
                f"this tokenizer reads part of the text as a control token ({names}) however it is "
                "split: change that text, or allow control tokens with special_tokens=True"
            )
        ids += new
    return ids


def ids_of(tokenizer: PreTrainedTokenizerBase, *pieces: str) -> list[int]:
    """Ids of `pieces` joined, without special tokens of the tokenizer's own.

    What a `Content` among them spells stays text; raises KvfoldError as `segment_ids`.
    """
    if not any(isinstance(piece, Content) for piece in pieces):
        return _encoded(tokenizer, "".join(pieces))
    return segment_ids(tokenizer, segments(tokenizer, *pieces))


def led(tokenizer: PreTrainedTokenizerBase, part: str) -> tuple[str, int]:
    """Text to tokenize for a segment that is not the first, and leading tokens to drop from it."""
    lead, both = _encoded(tokenizer, LEAD), _encoded(tokenizer, LEAD + part)
    return (LEAD + part, len(lead)) if both[: len(lead)] == lead else (part, 0)


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Most characters that one token stands for; None if there is no bound.

    Only a byte-level vocabulary drops no character and has no unknown ones. NFC writes at most four
    characters as one.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = type(getattr(backend, "normalizer", None)).__name__
    decoder = type(getattr(backend, "decoder", None)).__name__
    if decoder != "ByteLevel" or normalizer not in ("NoneType", "NFC"):
        return None
    return max(map(len, tokenizer.get_vocab())) * (4 if normalizer == "NFC" else 1)


def least_tokens(parts: Iterable[str], longest: int | None) -> int:
    """Lower bound of the segments' number of tokens, without tokenizing them.

    Each has one, and one for each `longest_token` of characters.
    """
    return sum(-(-len(part) // (longest or max(1, len(part)))) for part in parts)


def own_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer itself puts before and after a text."""
    probe = "a"
    bare, whole = _encoded(tokenizer, probe), list(tokenizer(probe).input_ids)
    offsets = range(len(whole) - len(bare) + 1)
    start = next((i for i in offsets if whole[i : i + len(bare)] == bare), 0)
    return whole[:start], whole[start + len(bare) :]


@lru_cache(maxsize=8)
def _pattern(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Pattern for any of `texts`, the longest first."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _unknown(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Id of words outside the vocabulary; None if that token has another meaning too."""
    another = tokenizer.unk_token in (tokenizer.bos_token, tokenizer.eos_token)
    return None if another else tokenizer.unk_token_id


def _led_ids(tokenizer: PreTrainedTokenizerBase, part: str, lead: list[int]) -> list[int]:
    """Ids of a segment that is not the first, as `led` says."""
    both = _encoded(tokenizer, LEAD + part)
    return both[len(lead) :] if both[: len(lead)] == lead else _encoded(tokenizer, part)


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)
