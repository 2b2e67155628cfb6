# SPDX-License-Identifier: Apache-2.0
"""Documents to inspect: token ids, the text of each token, and the positions of needles."""

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
from kvfold.eval import short_ruler
from kvfold.hf.chat_template import PromptFrame, token_count, token_ids
from kvfold.hf.user_text import content, led, segments

KEYS = 6  # needles of a generated document
LENGTH = 2048  # tokens of a generated document
NEEDLE = re.compile(r"One of the special magic numbers for \S+ is: \d+\.")


@dataclass(frozen=True)
class NeedleSpan:
    """Token positions `start` to `stop − 1` of a needle; `asked` if the question is about it."""

    start: int
    stop: int
    asked: bool


@dataclass(frozen=True)
class InspectedText:
    """A text in the place of a user's message: the chat template's opening, then the text.

    `ids [1, N]` are the token ids, `pieces` the N texts of the tokens, which concatenate to the
    whole. With `special_tokens`, control tokens spelt in the text become special tokens.
    """

    text: str
    ids: Tensor
    pieces: tuple[str, ...]
    needles: tuple[NeedleSpan, ...] = ()
    special_tokens: bool = False

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, text: str, special_tokens: bool = False
    ) -> InspectedText:
        """`text` tokenised as in `kvfold.compress`; raises KvfoldError below two tokens."""
        whole = PromptFrame.of(tokenizer).before, content(text, special_tokens)
        ids = token_ids(tokenizer, *whole)
        if ids.shape[1] < 2:
            raise KvfoldError("the text is shorter than two tokens: there is nothing to inspect")
        pieces = text_of_tokens(tokenizer, segments(tokenizer, *whole), ids)
        return cls(text, ids, tuple(pieces), special_tokens=special_tokens)

    @classmethod
    def with_needles(
        cls, tokenizer: PreTrainedTokenizerBase, length: int, seed: int
    ) -> InspectedText:
        """Needles in noise, a question about one, and the first words of its answer.

        Raises KvfoldError if `length` tokens cannot hold the needles.
        """
        count = partial(token_count, tokenizer)
        try:
            sample = short_ruler.generate("multikey", length, count, random.Random(seed), keys=KEYS)
        except ValueError as problem:
            raise KvfoldError(f"{problem}: give a text with --file or --prompt") from problem
        question, after = sample.questions[0], PromptFrame.of(tokenizer).after
        text = f"{sample.document}\n{question.text}{after}{question.prefix}"
        made = cls.of(tokenizer, text, special_tokens=True)
        needles = [
            NeedleSpan(start, stop, asked=question.answers[0] in needle)
            for start, stop, needle in needles_in(made.pieces)
        ]
        return replace(made, needles=tuple(needles))


def needles_in(pieces: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """(start, stop, text) of each needle in the tokens with these `pieces`; `stop` is exclusive."""
    for match in NEEDLE.finditer("".join(pieces)):
        yield *tokens_within(pieces, *match.span()), match[0]


def tokens_within(pieces: Sequence[str], begin: int, end: int) -> tuple[int, int]:
    """Range of the tokens with these `pieces` that hold characters `begin` to `end`."""
    ends = list(itertools.accumulate(map(len, pieces), initial=0))
    inside = [t for t in range(len(pieces)) if ends[t] < end and ends[t + 1] > begin]
    return inside[0], inside[-1] + 1


def text_of_tokens(
    tokenizer: PreTrainedTokenizerBase, parts: Sequence[str], ids: Tensor
) -> list[str]:
    """The text of each token of `ids [1, N]`, which are the tokens of the segments `parts`.

    A character spread over several tokens belongs to the first of them.
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
