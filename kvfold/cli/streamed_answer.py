# SPDX-License-Identifier: Apache-2.0
"""Streamed answers in the terminal: a spinner until the first token, then the text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.cache.cache import CompressedCache
from kvfold.contexts.answer import AnswerStream


@dataclass
class TokenTimer:
    """Streamer for `generate` that records token times; calls `first_came` at the first token.

    `started` and `times` are of `time.perf_counter`, in seconds.
    """

    first_came: Callable[[], None]
    started: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)
    prompt_seen: bool = False

    def put(self, _: Tensor) -> None:
        """Called with the prompt first, then with each token."""
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            self.first_came()

    def end(self) -> None:
        """Called when generation ends."""

    @property
    def first_token(self) -> float:
        """Seconds until the first token."""
        return self.times[0] - self.started

    @property
    def per_token(self) -> float | None:
        """Mean seconds between tokens; None if only one was generated."""
        steps = len(self.times) - 1
        return (self.times[-1] - self.times[0]) / steps if steps > 0 else None


def streamed_answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    cache: CompressedCache,
    notes: Console,
    put: Callable[[str], Any],
    **options: Any,
) -> tuple[str, TokenTimer]:
    """The answer to the prompt `ids [1, N]`, streamed to `put`, and its token times.

    `options` and errors are those of `kvfold.generate`.
    """
    prompt = ids.shape[1]
    said = AnswerStream(tokenizer, prompt, (), _without_leading_space(put), Event())
    with notes.status(f"reading {prompt:,} tokens") as waiting:
        clock = TokenTimer(waiting.stop)
        produced = kvfold.generate(
            model,
            ids,
            cache=cache,
            attention_mask=ids.new_ones(ids.shape),
            streamer=clock,
            stopping_criteria=[said],
            **options,
        )
    said.finish(produced[0, prompt:].tolist())
    return said.text.strip(), clock


def _without_leading_space(put: Callable[[str], Any]) -> Callable[[str], None]:
    """`put` for pieces of a text without its leading white space."""
    begun = False

    def pass_on(piece: str) -> None:
        nonlocal begun
        piece = piece if begun else piece.lstrip()
        begun = begun or bool(piece)
        if piece:
            put(piece)

    return pass_on
