# SPDX-License-Identifier: Apache-2.0
"""Generation of one answer: its text in pieces, and its finish reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

import torch
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.contexts.answer import AnswerStream, end_tokens
from kvfold.generation.generate import generate
from kvfold.serve.response_schemas import Reason
from kvfold.serve.sampling import SamplingParams


@dataclass(frozen=True)
class AnswerStarted:
    """First event of an answer: `prompt` tokens accepted, `cached` of them from a context."""

    prompt: int
    cached: int


@dataclass(frozen=True)
class AnswerFinished:
    """Last event of an answer: `tokens` generated, the finish reason, and the tokens of its text.

    `said` may be fewer than were generated: a stop string is no part of an answer.
    """

    tokens: int
    reason: Reason
    said: Sequence[int]


def generate_answer(
    model: PreTrainedModel,
    tokenizer: Any,
    cache: CompressedCache,
    ids: list[int],
    sampling: SamplingParams,
    most: int,
    prefill_chunk: int | None,
    put: Callable[[Any], None],
    cancelled: Event,
) -> AnswerFinished:
    """Generates at most `most` tokens after `ids`, a prefix of which `cache` may hold already.

    `put` gets the text in pieces, as for `Chat.stream`; a set `cancelled` ends it at the next
    token. `prefill_chunk` tokens are read per forward. Raises what `kvfold.generate` raises.
    """
    asked = torch.tensor([ids], device=model.device)
    said = AnswerStream(tokenizer, len(ids), sampling.stop, put, cancelled)
    out = generate(
        model,
        asked,
        cache=cache,
        attention_mask=torch.ones_like(asked),
        prefill_chunk=prefill_chunk,
        allow_longer=True,  # checked by the engine
        do_sample=False,
        max_new_tokens=most,
        logits_processor=sampling.processors(asked.device),
        stopping_criteria=[said],
    )
    tokens: list[int] = out[0, len(ids) :].tolist()
    kept = said.finish(tokens)
    ended = said.stopped or (tokens and tokens[-1] in end_tokens(model))
    return AnswerFinished(len(tokens), "stop" if ended else "length", kept)


class StrippedText:
    """Strips white space from both ends of a text that comes in pieces, as `Context.ask` does."""

    def __init__(self) -> None:
        self._begun, self._held = False, ""

    def of(self, piece: str) -> str:
        """Text to send after this piece; white space at its end waits for the next one."""
        text = self._held + piece
        if not self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._begun |= bool(shown)
        self._held = text[len(shown) :]
        return shown
