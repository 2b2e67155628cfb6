# SPDX-License-Identifier: Apache-2.0
"""A served model with its settings: what requests may ask of it, and jobs that can be cancelled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, local
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvfold.cache.cache import CompressedCache
from kvfold.contexts.answer import AnswerStream, end_tokens, generate_answer
from kvfold.errors import KvfoldError
from kvfold.generation.static.captured import eager_because
from kvfold.hf.chat_template import PromptFrame
from kvfold.hf.lookups import learned_positions
from kvfold.hf.models import text_config, trained_length
from kvfold.interruption import check_interrupted, interrupt_by
from kvfold.methods.base import Method, parse, parts_of
from kvfold.methods.description import files_of
from kvfold.serve.errors import ApiError
from kvfold.serve.prompt_encoder import PromptEncoder
from kvfold.serve.request_schemas import AnswerRequest, ChatRequest, CompletionRequest
from kvfold.serve.response_schemas import Reason
from kvfold.serve.settings import ServerSettings
from kvfold.serve.worker_threads import stopping

# Lowest temperature: dividing by less could overflow float32. At this one it is greedy already.
COLDEST = 1e-6


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


class ServedModel:
    """One model under a server's settings; `name` is the model name that clients send."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: ServerSettings,
    ) -> None:
        self.name, self.model, self.tokenizer, self.settings = name, model, tokenizer, settings
        # A table of learned positions has none beyond its end.
        table = learned_positions(model) is not None
        self.max_length = None if settings.allow_longer and not table else trained_length(model)
        limits = [n for n in (settings.context_tokens, self.max_length) if n is not None]
        most, vocabulary = min(limits, default=None), text_config(model).vocab_size
        frame, special = PromptFrame.of(tokenizer), settings.special_tokens
        self.prompts = PromptEncoder(tokenizer, frame, vocabulary, special, most, self.check_wanted)
        self.allowed_methods = (
            None
            if settings.methods is None
            else _names(settings.method, settings.session_method, *settings.methods)
        )
        self._of_thread = local()
        self._hook = model.register_forward_pre_hook(self._forward_begins, with_kwargs=True)
        self.abandoned_tokens = 0

    def tokens_to_generate(self, prompt: int, request: ChatRequest | CompletionRequest) -> int:
        """The number of tokens to generate: as many as wanted, within the server's limits.

        Raises ApiError if the prompt leaves none.
        """
        allowed = self.settings.answer_tokens
        left = allowed if self.max_length is None else self.max_length - prompt
        if left < 1:
            raise ApiError(
                400,
                f"the model reads and writes {self.max_length} tokens, of which {prompt} of the "
                "prompt leave none: shorten it",
                code="context_length_exceeded",
            )
        return min(allowed, left, request.most_tokens or request.usual_tokens or allowed)

    def generate_answer(
        self,
        request: ChatRequest | CompletionRequest,
        cache: CompressedCache,
        ids: list[int],
        cached: int,
        put: Callable[[Any], None],
        cancelled: Event,
    ) -> AnswerFinished:
        """Generates the answer after `ids`, of which `cache` may hold a prefix already.

        `cached` of them come from a context or session.
        `put` gets `AnswerStarted`, then the text in pieces, as for `Chat.stream`; a set `cancelled`
        ends it at the next token. Raises ApiError for a prompt that is too long, and what
        `kvfold.generate` raises.
        """
        sampling, most = SamplingParams.of(request), self.tokens_to_generate(len(ids), request)
        put(AnswerStarted(len(ids), cached))
        asked = torch.tensor([ids], device=self.model.device)
        said = AnswerStream(self.tokenizer, len(ids), sampling.stop, put, cancelled)
        options = {
            "prefill_chunk": self.settings.prefill_chunk,
            "max_new_tokens": most,
            "logits_processor": sampling.processors(asked.device),
            "capture": self.settings.capture and eager_because(cache) is None,
        }
        tokens = generate_answer(self.model, cache, asked, said, options)
        kept = said.finish(tokens)
        ended = said.reply(tokens, end_tokens(self.model)).ended
        return AnswerFinished(len(tokens), "length" if ended == "limit" else "stop", kept)

    def check_text(self, text: str, frame: PromptFrame | None = None) -> int:
        """The tokens of a text in a template's opening; raises ApiError for none, or too many."""
        opening = (frame or self.prompts.frame).before
        parts = self.prompts.split(opening, self.prompts.client_text(text))
        tokens = len(self.prompts.ids(parts))
        self.prompts.check_length(tokens)
        if not tokens:
            raise ApiError(400, "the text has no tokens", param="text")
        return tokens

    def clients_method(self, named: str) -> Method:
        """The method of a request, if this server's settings allow it; KvfoldError if not."""
        method = parse(named)
        if self.allowed_methods is not None and not _names(method) <= self.allowed_methods:
            raise KvfoldError(
                f"this server takes {', '.join(sorted(self.allowed_methods))}, not {method}"
            )
        if named not in (self.settings.method, self.settings.session_method):
            for option in files_of(method):
                raise KvfoldError(f"{option} names a file, which clients may not")
        return method

    def start_job(self, cancelled: Event) -> None:
        """Notes the cancel flag of this thread's job, and sets its token count to zero."""
        self._of_thread.cancelled, self._of_thread.tokens = cancelled, 0
        interrupt_by(self.check_wanted)
        self.check_wanted()

    def _forward_begins(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: counts tokens; ends interrupted work at its next forward."""
        check_interrupted()
        ids = kwargs.get("input_ids")
        if ids is not None and hasattr(self._of_thread, "tokens"):
            self._of_thread.tokens += ids.shape[-1]

    def check_wanted(self) -> None:
        """Raises ApiError if the client hung up or the server's grace is over."""
        cancelled = getattr(self._of_thread, "cancelled", None)
        if cancelled is not None and cancelled.is_set():
            self.abandoned_tokens += self._of_thread.tokens
            self._of_thread.tokens = 0
            raise stopping()


def _names(*methods: str | Method) -> frozenset[str]:
    """Names of methods; of a composition, those of its parts; of a preset, its method's name."""
    parsed = [parse(method) for method in methods]
    return frozenset(part.name for method in parsed for part in parts_of(method))


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
