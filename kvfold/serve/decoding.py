# SPDX-License-Identifier: Apache-2.0
"""One answer, piece by piece, and why it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Any

import torch
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.contexts.answer import Answer
from kvfold.generation.generate import generate
from kvfold.serve.response_schemas import Reason
from kvfold.serve.sampling import Sampling


@dataclass(frozen=True)
class Started:
    """A prompt of `prompt` tokens is accepted, of which a context holds `cached`."""

    prompt: int
    cached: int


@dataclass(frozen=True)
class Finished:
    """An answer of `tokens` tokens has ended."""

    tokens: int
    reason: Reason


def answer(
    model: PreTrainedModel,
    tokenizer: Any,
    cache: CompressedCache,
    ids: list[int],
    sampling: Sampling,
    most: int,
    prefill_chunk: int | None,
    put: Callable[[Any], None],
    cancelled: Event,
) -> Finished:
    """Generates at most `most` tokens after all of `ids`, which `cache` may have read in part.

    Pieces of text go to `put`, as for `Chat.stream`. `cancelled` ends it at the next token.
    """
    asked = torch.tensor([ids], device=model.device)
    said = Answer(tokenizer, len(ids), sampling.stop, put, cancelled)
    out = generate(
        model,
        asked,
        cache=cache,
        attention_mask=torch.ones_like(asked),
        prefill_chunk=prefill_chunk,
        allow_longer=True,  # the engine has looked
        do_sample=False,
        max_new_tokens=most,
        logits_processor=sampling.processors(asked.device),
        stopping_criteria=[said],
    )
    tokens: list[int] = out[0, len(ids) :].tolist()
    said.finish(tokens)
    end = model.generation_config.eos_token_id
    ended = said.stopped or (tokens and tokens[-1] in (end if isinstance(end, list) else [end]))
    return Finished(len(tokens), "stop" if ended else "length")


class Stripped:
    """Text without white space at both ends, piece by piece: what `Context.ask` gives back."""

    def __init__(self) -> None:
        self._begun, self._held = False, ""

    def of(self, piece: str) -> str:
        """As much of what came as cannot be the end's white space."""
        text = self._held + piece
        if not self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._begun |= bool(shown)
        self._held = text[len(shown) :]
        return shown
