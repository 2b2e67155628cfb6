# SPDX-License-Identifier: Apache-2.0
"""Sampling of tokens, with a random generator per request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvfold.serve.request_schemas import AnswerRequest

# Lowest temperature: dividing by less could overflow float32. At this one it is greedy already.
COLDEST = 1e-6


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of an answer, and the strings that end it.

    The repetition penalty sees all tokens of the prompt, those of a compressed context included.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int | None
    stop: tuple[str, ...]

    @classmethod
    def of(cls, request: AnswerRequest) -> SamplingParams:
        """A request's parameters, with OpenAI's defaults for those not given."""
        return cls(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(0, request.top_k or 0),
            min_p=request.min_p or 0.0,
            repetition_penalty=request.repetition_penalty or 1.0,
            seed=request.seed,
            stop=request.stops,
        )

    def processors(self, device: torch.device) -> list[LogitsProcessor]:
        """Logits processors that make greedy generation sample, in the order of transformers.

        At temperature 0 only the repetition penalty, if any.
        """
        chain: list[LogitsProcessor] = []
        if self.repetition_penalty != 1:
            chain.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.temperature == 0:
            return chain
        chain.append(TemperatureLogitsWarper(max(self.temperature, COLDEST)))
        if self.top_k:
            chain.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            chain.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            chain.append(MinPLogitsWarper(self.min_p))
        generator = torch.Generator(device)
        generator.seed() if self.seed is None else generator.manual_seed(self.seed)
        return [*chain, TokenSampler(generator)]


class TokenSampler(LogitsProcessor):
    """Logits processor that samples a token and masks all others.

    `do_sample` draws from torch's global generator, which all threads share: a request's seed would
    not fix its answer while others run.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores [B, V]` → 0 for the token that was drawn, −inf for all others."""
        drawn = torch.multinomial(scores.softmax(-1), 1, generator=self.generator)
        return torch.full_like(scores, float("-inf")).scatter_(1, drawn, 0.0)
