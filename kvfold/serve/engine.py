# SPDX-License-Identifier: Apache-2.0
"""The model side of the server: prompts read after a context or alone, and new contexts.

Methods of `Engine` run in worker threads; the HTTP side hands them over as jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from threading import Event
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.budget import Budget
from kvfold.cache.cache import CompressedCache
from kvfold.cache.fork import end_turn, fork, fork_within
from kvfold.cache.shrink import is_nested
from kvfold.contexts.context import Context
from kvfold.contexts.files.coding import Coding
from kvfold.errors import KvfoldError
from kvfold.generation.static.captured import check_captured
from kvfold.hf.chat_template import SEPARATOR, PromptFrame
from kvfold.hf.identity import check_identifiable
from kvfold.hf.models import read_tokens
from kvfold.hf.user_text import Content
from kvfold.methods.base import Across, Measured, Method, parse
from kvfold.methods.layer_budgets import Given, layerwise
from kvfold.methods.stages.allocate.parts import LayerParts
from kvfold.serve.context_folder import ContextFolder
from kvfold.serve.context_pool import TEXT, TOKENS, ContextPool, token_bytes
from kvfold.serve.errors import ApiError, refusals
from kvfold.serve.prompt_encoder import key_bytes, segments_of
from kvfold.serve.request_schemas import ChatRequest, CompletionRequest, ContextRequest
from kvfold.serve.served_model import AnswerFinished, ServedModel
from kvfold.serve.sessions import Sessions
from kvfold.serve.settings import ServerSettings
from kvfold.serve.shadow import Shadow, ShadowReader
from kvfold.serve.shadows import Shadows, answering
from kvfold.serve.stored import PrefixKey, Stored
from kvfold.serve.worker_threads import WorkerThreads

# Methods round sizes of layers and heads: so much of a budget is kept for certain.
CERTAIN = 0.95
Put = Callable[[Any], None]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedPrompt:
    """All tokens of a prompt, and a cache to generate with, which holds `cached` of them.

    `held` is the context that the cache was forked from, `turns` the tokens after it, if any.
    """

    cache: CompressedCache
    ids: list[int]
    cached: int = 0
    held: Stored[Context] | None = None
    turns: tuple[list[int], ...] = ()

    @classmethod
    def after(
        cls,
        held: Stored[Context],
        context: Context,
        turns: list[list[int]],
        reader: CompressedCache,
    ) -> PreparedPrompt:
        """The prompt of some turns after a context, and the cache that read these."""
        read: list[int] = context.ids[0].tolist()
        return cls(reader, [*read, *chain(*turns)], len(read), held, tuple(turns))

    def shadow(self, answer: Sequence[int]) -> Shadow | None:
        """What it takes to compare the answer later; None where a full cache gave it."""
        return None if self.held is None else Shadow.of(self.held, self.turns, answer)


class Engine(ServedModel):
    """One model with its contexts and sessions, and the threads that answer with it.

    Raises KvfoldError if the model cannot use the default method or budget, or its steps cannot be
    captured where that is asked for, and for offloaded weights.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: ServerSettings,
    ) -> None:
        check_identifiable(model)
        method = parse(settings.method)
        budget = settings.budget if method.takes_budget else None
        cache = CompressedCache(model, method, budget, tokenizer=tokenizer)
        if settings.capture:
            check_captured(model, cache, model.generation_config)
        if settings.codec is not None:
            Coding.of(settings.codec, model)
        super().__init__(name, model, tokenizer, settings)
        self.token_bytes = bytes_per_token(model)
        self.workers = WorkerThreads(settings.workers, settings.queue)
        self.contexts = ContextPool(
            partial(kvfold.load, model=model, tokenizer=tokenizer),
            ContextFolder(settings.folder),
            settings.memory,
            settings.contexts,
            settings.shrink,
            settings.codec,
            self.check_wanted,
        )
        self.sessions = Sessions(self)
        self.shadows: Shadows | None = None
        if settings.shadow:
            reader = ShadowReader(model, self.contexts, self._reader, self.token_bytes)
            self.shadows = Shadows(settings, self.workers, reader.loss)

    # --- answers ----------------------------------------------------------------------------

    def answer(
        self, request: ChatRequest | CompletionRequest, put: Put, cancelled: Event
    ) -> AnswerFinished:
        """Generates an answer: `put` gets `AnswerStarted`, then pieces of text.

        Raises ApiError: before `AnswerStarted` for a request that is refused, later for what only
        the generation refuses, and if the client hung up or the server stops.
        """
        shadows = self.shadows if self.shadows is not None and self.shadows.sampled() else None
        if isinstance(request, ChatRequest) and request.session_id is not None:
            done = self.sessions.answer(request, put, cancelled)
            if shadows is not None:
                shadows.skip("session")
            return done
        self.start_job(cancelled)
        with refusals(), self._prepared(request) as prompt, answering(shadows):
            ids = prompt.ids
            done = self.generate_answer(request, prompt.cache, ids, prompt.cached, put, cancelled)
            if shadows is not None:  # one whose client has hung up, too, as far as it came
                shadows.add(prompt.shadow(done.said))
        self.check_wanted()
        return done

    @contextmanager
    def _prepared(self, request: ChatRequest | CompletionRequest) -> Iterator[PreparedPrompt]:
        """The prompt to answer, its context kept in memory for the block.

        Raises ApiError for a missing context, an empty prompt and a prompt that is too long.
        """
        if request.context_id is not None:
            held = self.contexts.get(request.context_id)
            with self.contexts.reading(held.id, held) as context:
                turns = self._turn_ids(request, context)
                self.prompts.check_length(sum(map(len, turns)))
                reader = self._reader(context, turns)
                yield PreparedPrompt.after(held, context, turns, reader)
            return
        parts: list[str] = []
        if isinstance(request, ChatRequest):
            parts = self.prompts.conversation(request.messages, request.template)
            ids = self.prompts.ids(parts)
        else:
            prompt = request.text_or_tokens
            if isinstance(prompt, str):
                parts = self.prompts.split(self.prompts.client_text(prompt))
            ids = self.prompts.prompt(prompt)
        if not ids:
            raise ApiError(400, "the prompt is empty", param="prompt")
        self.prompts.check_length(len(ids))
        with ExitStack() as stack:
            found = self._longest_prefix(ids, parts) if request.prefix_cache else None
            if found is None:
                yield PreparedPrompt(CompressedCache(self.model, "full"), ids)
                return
            held, rest = found
            try:
                context = stack.enter_context(self.contexts.reading(held.id, held))
                reader = self._fork(context)
            except ApiError as refused:
                log.warning("a prompt begins with context %s, but %s", held.id, refused)
                yield PreparedPrompt(CompressedCache(self.model, "full"), ids)
            else:
                turns = self._split_question(request, rest)
                self._read_turns(reader, context, turns)
                yield PreparedPrompt.after(held, context, turns, reader)

    def _reader(self, context: Context, turns: list[list[int]]) -> CompressedCache:
        """The cache to answer the last of `turns` with; ApiError as of `_fork`."""
        reader = self._fork(context)
        self._read_turns(reader, context, turns)
        return reader

    def _fork(self, context: Context) -> CompressedCache:
        """A fork of the context's cache; ApiError if it cannot be one within the chat budget."""
        if self.settings.chat_budget is None:
            return fork(context.cache)
        try:
            return fork_within(context.cache, self.settings.chat_budget)
        except KvfoldError as refused:
            raise ApiError(400, f"this server bounds conversations: {refused}") from refused

    def _read_turns(
        self, reader: CompressedCache, context: Context, turns: list[list[int]]
    ) -> None:
        """With a chat budget, reads all `turns` of token ids but the last, the question."""
        if self.settings.chat_budget is None:
            return
        ids = context.ids
        for turn in filter(None, turns[:-1]):
            ids = torch.cat([ids, ids.new_tensor([turn])], 1)
            end_turn(self.model, reader, ids, self.settings.prefill_chunk)

    def _split_question(
        self, request: ChatRequest | CompletionRequest, rest: list[int]
    ) -> list[list[int]]:
        """The tokens `rest` after a context, split before the last question of a conversation."""
        if not isinstance(request, ChatRequest) or len(request.messages) == 1:
            return [rest]
        last = self.prompts.client_text(request.messages[-1].text)
        after = PromptFrame.of(self.tokenizer, None, request.template).after
        question = len(self.prompts.ids(self.prompts.split(last, after)))
        return [part for part in (rest[:-question], rest[-question:]) if part]

    def _turn_ids(
        self, request: ChatRequest | CompletionRequest, context: Context
    ) -> list[list[int]]:
        """Token ids after the context that the request names, turn by turn, the question last."""
        if isinstance(request, ChatRequest):
            return self.prompts.turns(request.messages, context.frame, request.template)
        return [self.prompts.continuation(request.text_or_tokens)]

    def _longest_prefix(
        self, ids: list[int], parts: list[str]
    ) -> tuple[Stored[Context], list[int]] | None:
        """The longest stored context that is a prefix of the prompt, and the tokens after it.

        Prefixes are compared as tokens and as text: the last token of a document often merges with
        the blank line after it. After a match by text the rest is tokenised on its own, as in
        `Context.ask`, and must have tokens to read.
        """
        data = key_bytes(parts)
        by_tokens = self.contexts.longest(TOKENS, token_bytes(ids))
        by_text = self.contexts.longest(TEXT, data)
        if by_text is not None and (by_tokens is None or by_tokens.stats.seen < by_text.stats.seen):
            first, *others = segments_of(data[by_text.keys[TEXT].length :])
            if rest := self.prompts.ids([SEPARATOR + first, *others]):
                return by_text, rest
        return None if by_tokens is None else (by_tokens, ids[by_tokens.stats.seen :])

    # --- contexts ---------------------------------------------------------------------------

    def create(self, request: ContextRequest, _: Put, cancelled: Event) -> Stored[Context]:
        """Compresses a text and stores its context.

        Raises ApiError for a text or method refused.
        """
        settings = self.settings
        self.start_job(cancelled)
        self.contexts.check_new(request.id)
        with refusals():
            system, template = request.system, request.chat_template_kwargs
            frame = PromptFrame.of(self.tokenizer, system, template, settings.special_tokens)
            tokens = self.check_text(request.text, frame)
            method = self.clients_method(request.method or settings.method)
            budget: Given = request.budget
            if budget is None and method.takes_budget:
                budget = settings.budget
            method, budget = layerwise(method, budget)
            limit = None if budget is None else Budget.of(budget)
            self.contexts.check_size(least_bytes(method, limit, tokens, self.token_bytes))
            context = kvfold.compress(
                self.model,
                self.tokenizer,
                Content(request.text),
                method,
                limit,
                # A method that prunes tokens between layers reads its text in one forward.
                prefill_chunk=None if method.stages().token_pruning else settings.prefill_chunk,
                special_tokens=settings.special_tokens,
                allow_longer=settings.allow_longer,
                keep_scores=settings.shrink is not None and is_nested(method),
                system=system,
                template=template,
            )
        self.check_wanted()
        # The template's opening as it was read: some tell the date.
        parts = self.prompts.split(context.frame.before, self.prompts.client_text(request.text))
        parts[-1] += SEPARATOR
        return self.contexts.add(context, request.id, {TEXT: PrefixKey.of(key_bytes(parts))})

    # --- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Cancels running jobs, waits for them, removes the hook and closes the contexts."""
        self.workers.cancel()
        self.workers.close()
        if self.shadows is not None:
            self.shadows.close()
        self._hook.remove()
        try:
            self.contexts.close()
        finally:
            self.sessions.held.close()


@torch.no_grad()
def bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of one token in a full cache of all compressed layers, as a forward stores it."""
    cache = CompressedCache(model, "full")
    read_tokens(model, torch.zeros(1, 1, dtype=torch.long, device=model.device), cache, None)
    return cache.stats().nbytes_full


def least_bytes(method: Method, budget: Budget | None, tokens: int, per_token: int) -> int:
    """Bytes that a context of `tokens` takes at least; 0 where its method alone decides.

    Encoded entries are smaller than those of a full cache, by the method.
    """
    stages = method.stages()
    if stages.encode is not None or stages.inexact or isinstance(stages.allocate, Measured):
        return 0
    # A layer with more than the text's tokens leaves none to others.
    if isinstance(stages.allocate, Across) and isinstance(stages.allocate.parts, LayerParts):
        return 0
    full = tokens * per_token
    if budget is None:
        return full if stages.allocate is None and not stages.runs_own_forwards else 0
    if budget.kind == "ratio":
        kept = budget.amount * full
    else:
        kept = budget.amount * (per_token if budget.kind == "tokens" else 1)
    return int(CERTAIN * min(full, kept))
