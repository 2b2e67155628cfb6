# SPDX-License-Identifier: Apache-2.0
"""How tokens are drawn: by a random generator of each request's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from kvfold.serve.request_schemas import Request

# Divided by less, scores would pass what float32 holds; nothing but the likeliest is drawn here.
COLDEST = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are drawn, and before which texts it ends."""

    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]

    @classmethod
    def of(cls, request: Request) -> Sampling:
        """What a request asks for; where it does not say, OpenAI's defaults."""
        return cls(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=request.seed,
            stop=request.stops,
        )

    def processors(self, device: torch.device) -> list[LogitsProcessor]:
        """What makes greedy generation draw; nothing at temperature 0."""
        if self.temperature == 0:
            return []
        temperature = max(self.temperature, COLDEST)
        chain: list[LogitsProcessor] = [TemperatureLogitsWarper(temperature)]
        if self.top_p < 1:
            chain.append(TopPLogitsWarper(self.top_p))
        generator = torch.Generator(device)
        generator.seed() if self.seed is None else generator.manual_seed(self.seed)
        return [*chain, Draw(generator)]


class Draw(LogitsProcessor):
    """Draws a token, and leaves no other to choose from.

    torch's global generator, which `do_sample` draws from, is shared by all threads: a seed would
    fix nothing while others answer.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores [B, V]` → 0 for the token that was drawn, −inf for all others."""
        drawn = torch.multinomial(scores.softmax(-1), 1, generator=self.generator)
        return torch.full_like(scores, float("-inf")).scatter_(1, drawn, 0.0)
