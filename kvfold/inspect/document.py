# SPDX-License-Identifier: Apache-2.0
"""The text that is looked at: its tokens as they are read, and where its needles lie."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvfold.errors import KvfoldError
from kvfold.eval import ruler
from kvfold.hf.chat_template import Frame, token_count, token_ids
from kvfold.hf.user_text import content, led, segments

KEYS = 6
LENGTH = 2048
NEEDLE = re.compile(r"One of the special magic numbers for \S+ is: \d+\.")


@dataclass(frozen=True)
class Needle:
    """Positions `start` to `stop − 1` hold what may be asked for; `asked`: what is."""

    start: int
    stop: int
    asked: bool


@dataclass(frozen=True)
class Document:
    """A text behind what a chat template puts before a user's message.

    `ids [1, N]` are what a model reads, `pieces` the text of each, which joined are the whole.
    With `special_tokens` its control tokens are meant, as a chat template's are.
    """

    text: str
    ids: Tensor
    pieces: tuple[str, ...]
    needles: tuple[Needle, ...] = ()
    special_tokens: bool = False

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, text: str, special_tokens: bool = False
    ) -> Document:
        """`text` as `kvfold.compress` reads it; raises KvfoldError for one without tokens."""
        whole = Frame.of(tokenizer).before, content(text, special_tokens)
        ids = token_ids(tokenizer, *whole)
        if ids.shape[1] < 2:
            raise KvfoldError("the text is shorter than two tokens: there is nothing to look at")
        pieces = text_of_tokens(tokenizer, segments(tokenizer, *whole), ids)
        return cls(text, ids, tuple(pieces), special_tokens=special_tokens)

    @classmethod
    def with_needles(cls, tokenizer: PreTrainedTokenizerBase, length: int, seed: int) -> Document:
        """Needles in noise, a question about one, and the first words of its answer."""
        count = partial(token_count, tokenizer)
        try:
            sample = ruler.generate("multikey", length, count, random.Random(seed), keys=KEYS)
        except ValueError as problem:
            raise KvfoldError(f"{problem}: give a text with --file or --prompt") from problem
        question, after = sample.questions[0], Frame.of(tokenizer).after
        text = f"{sample.document}\n{question.text}{after}{question.prefix}"
        made = cls.of(tokenizer, text, special_tokens=True)
        needles = [
            Needle(start, stop, asked=question.answers[0] in needle)
            for start, stop, needle in needles_in(made.pieces)
        ]
        return replace(made, needles=tuple(needles))


def needles_in(pieces: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Where needles lie among the tokens that have these `pieces`, `stop` excluded, and each."""
    ends = list(itertools.accumulate(map(len, pieces), initial=0))
    for match in NEEDLE.finditer("".join(pieces)):
        tokens = range(len(pieces))
        inside = [t for t in tokens if ends[t] < match.end() and ends[t + 1] > match.start()]
        yield inside[0], inside[-1] + 1, match[0]


def text_of_tokens(
    tokenizer: PreTrainedTokenizerBase, parts: Sequence[str], ids: Tensor
) -> list[str]:
    """Each token's part of the text of these segments, which became `ids [1, N]`.

    The first of several tokens that share a character has all of it.
    """
    if not tokenizer.is_fast:
        return [str(tokenizer.decode([number])) for number in ids[0].tolist()]
    pieces: list[str] = []
    for part in parts:
        text, skipped = led(tokenizer, part) if pieces else (part, 0)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        at = len(text) - len(part)
        for _, stop in encoded.offset_mapping[skipped:]:
            pieces.append(text[at:stop])
            at = max(at, stop)
        pieces[-1] += text[at:]
    return pieces
