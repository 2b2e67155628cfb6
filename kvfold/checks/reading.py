# SPDX-License-Identifier: Apache-2.0
"""One reading of a batch of prompts, compressed by several methods to any number of budgets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.budget import Budget
from kvfold.cache.cache import CompressedCache
from kvfold.cache.copy_to_budget import observing_alike, reads_for
from kvfold.cache.fork import fork
from kvfold.checks.batches import PaddedIds
from kvfold.checks.encoded import EncodedPrompt
from kvfold.contexts.answer import GREEDY, end_tokens
from kvfold.eval.run.shared_reading import reads_for_others
from kvfold.generation.generate import generate
from kvfold.generation.reading import read_on, read_turn
from kvfold.hf.models import read_logits
from kvfold.methods.base import Method, parse
from kvfold.methods.stages.when import AtEnd

# A method and its budget, both as text; None for a method without budget.
MethodAtBudget = tuple[str, str | None]


@dataclass(frozen=True)
class CompressedPrompts:
    """Prompts whose first tokens `read [B, N]` are in `cache`, compressed.

    The prompts all have a context, or none has one.
    """

    prompts: tuple[EncodedPrompt, ...]
    cache: CompressedCache
    read: PaddedIds

    @property
    def stepwise(self) -> bool:
        """True if the cache changes while an answer is written, so that this one is used up by it.

        Forced tokens are then read one by one. A context that was compressed before its question
        never changes, as in `kvfold.compress`.
        """
        stages = self.cache.method.stages()
        changes = not isinstance(stages.when, AtEnd) or stages.encode is not None
        return self.prompts[0].context is None and changes

    @property
    def lengths(self) -> list[int]:
        """Tokens read of each prompt."""
        return [int(count) for count in self.read.mask.sum(1)]

    @property
    def unread(self) -> list[Tensor]:
        """The rest `[1, n]` of each prompt."""
        return [p.ids[:, n:] for p, n in zip(self.prompts, self.lengths, strict=True)]

    @torch.no_grad()
    def logits(self, model: PreTrainedModel, forced: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits `[S or S − 1, V]` that predict the `S` forced tokens of each row.

        The first is missing where all of the prompt was compressed at once: it came before.
        Read into the cache if `stepwise`, else into a fork, in one forward.
        """
        fed = [_followed(r, own[:-1]) for r, own in zip(self.unread, forced, strict=True)]
        counts = [
            len(own) - (rest.shape[1] == 0) for rest, own in zip(self.unread, forced, strict=True)
        ]
        if not any(counts):
            return [torch.empty(0, model.config.get_text_config().vocab_size) for _ in counts]
        if self.stepwise:
            return self._step_logits(model, fed, counts)
        new = PaddedIds.of(fed, model.device)
        found = _logits(model, fork(self.cache), self.read, new, max(counts))
        return [row[len(row) - count :] for row, count in zip(found, counts, strict=True)]

    def _step_logits(
        self, model: PreTrainedModel, fed: Sequence[Tensor], counts: Sequence[int]
    ) -> list[Tensor]:
        """Logits of `fed` tokens, read one by one; rows are independent and may go on too long."""
        longest = max(piece.shape[1] for piece in fed)
        columns = torch.cat([F.pad(piece, (0, longest - piece.shape[1])) for piece in fed])
        seen, steps = self.read, []
        for column in columns.to(model.device).split(1, 1):
            new = PaddedIds(column, torch.ones_like(column))
            steps.append(_logits(model, self.cache, seen, new, 1))
            seen = seen.followed_by(new)
        found = torch.cat(steps, 1)
        return [
            row[piece.shape[1] - count : piece.shape[1]]
            for row, piece, count in zip(found, fed, counts, strict=True)
        ]

    def answers(
        self, model: PreTrainedModel, known: Sequence[Sequence[int]], limit: int
    ) -> list[list[int]]:
        """Greedy answers of at most `limit` tokens, end token included, that begin with `known`.

        The first token must be known where all of the prompt was compressed at once.
        """
        ends, given = end_tokens(model), max(map(len, known))
        done = torch.tensor([len(own) < given or _ended(own, ends) for own in known])
        if given >= limit or bool(done.all()):
            return [list(own)[:limit] for own in known]
        fed = [_followed(rest, own) for rest, own in zip(self.unread, known, strict=True)]
        whole = self.read.followed_by(PaddedIds.of(fed, model.device))
        pad: dict[str, Any] = {"pad_token_id": ends[0]} if ends else {}
        out = generate(
            model,
            whole.ids,
            cache=self.cache if self.stepwise else fork(self.cache),
            attention_mask=whole.mask,
            max_new_tokens=limit - given,
            stopping_criteria=[_Finished(done.to(model.device))],
            allow_longer=True,  # lengths were checked before
            **GREEDY,
            **pad,
        )
        new = out[:, whole.ids.shape[1] :].tolist()
        rows = zip(known, done.tolist(), new, strict=True)
        return [list(own) if over else [*own, *_to_end(more, ends)] for own, over, more in rows]


class PromptReading:
    """A batch of prompts, read once for all methods that observe the same, at all budgets.

    Methods that compress inside the forward (token pruning between layers), latent caches (MLA) and
    methods that compress at the first generated token read it again each time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[EncodedPrompt],
    ) -> None:
        self.model, self.tokenizer, self.prompts = model, tokenizer, tuple(prompts)
        self._open: CompressedPrompts | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held for further methods and budgets."""
        return 0 if self._open is None else self._open.cache.stats().nbytes

    def serves(self, method: Method) -> bool:
        """True if what is held is read as `method` reads."""
        return self._open is not None and reads_for(self._open.cache.method, method)

    def release(self) -> None:
        """Drops what is held; the prompts are read again next."""
        self._open = None

    @torch.no_grad()
    def at(self, method: Method, budget: str | None) -> CompressedPrompts:
        """The prompts compressed to a budget; raises what `CompressedCache` raises."""
        if not reads_for_others(self.model, method):
            cache = self._new(method, budget)
            given = self._given(cache)
            read_turn(self.model, cache, given.ids, given.padding)
            return CompressedPrompts(self.prompts, cache, given)
        if self._open is None or not self.serves(method):
            self._open = self._read(self._new(method, budget))
        taken = self._open.cache.to_budget(self._of_all(budget), method)
        return replace(self._open, cache=taken)

    def _read(self, cache: CompressedCache) -> CompressedPrompts:
        """The prompts in a cache whose prefill stays open."""
        given = self._given(cache)
        # Left open: the cache is only copied, and dropped with its prefill unfinished.
        cache.phase.begin_reading()
        read_on(self.model, cache, given.ids, given.padding)
        return CompressedPrompts(self.prompts, cache, given)

    def _new(self, method: Method, budget: str | None) -> CompressedCache:
        seed = self.prompts[0].seed
        return CompressedCache(
            self.model, method, self._of_all(budget), tokenizer=self.tokenizer, seed=seed
        )

    def _of_all(self, budget: str | None) -> Budget | None:
        """The budget of the batch, each of whose prompts has `budget`."""
        return None if budget is None else Budget.of(budget).for_each(len(self.prompts))

    def _given(self, cache: CompressedCache) -> PaddedIds:
        """The tokens to compress: the context; or all, less the last for a method's own forwards.

        Those forwards come before the first answer token is predicted, as in `kvfold.generate`.
        """
        own = int(cache.runs_own_forwards)
        pieces = [p.ids[:, : p.context or p.ids.shape[1] - own] for p in self.prompts]
        return PaddedIds.of(pieces, self.model.device)


def reading_order(methods: Iterable[str]) -> list[str]:
    """Methods that observe the same, side by side; first the one that reads for the others."""
    return [method for group in observing_alike(methods, parse) for method in group]


@torch.no_grad()
def read_full(
    model: PreTrainedModel, prompts: Sequence[EncodedPrompt], pieces: int = 1
) -> CompressedPrompts:
    """Prompts in a full cache, the last token of each left to read at least; read in `pieces`."""
    cache = CompressedCache(model, "full")
    before = [min(p.context or p.ids.shape[1], p.ids.shape[1] - 1) for p in prompts]
    parts = [p.ids[:, :count] for p, count in zip(prompts, before, strict=True)]
    given = PaddedIds.of(parts, model.device)
    length = given.ids.shape[1]
    read_turn(model, cache, given.ids, given.padding, chunk=-(-length // pieces))
    return CompressedPrompts(tuple(prompts), cache, given)


@dataclass(frozen=True)
class _Finished:
    """Stopping criterion for `generate`: rows that are `done [B]` before it begins."""

    done: Tensor

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return self.done


def _logits(
    model: PreTrainedModel, cache: CompressedCache, seen: PaddedIds, new: PaddedIds, count: int
) -> Tensor:
    """Logits `[B, count, V]` of the last of the `new` columns, after those `seen`."""
    return read_logits(model, new.ids, cache, seen.followed_by(new).padding, count)


def _followed(rest: Tensor, tokens: Sequence[int]) -> Tensor:
    """Ids `[1, n]` of a piece and further tokens."""
    return torch.cat([rest, torch.tensor([list(tokens)], dtype=torch.long)], 1)


def _ended(tokens: Sequence[int], ends: Sequence[int]) -> bool:
    return bool(tokens) and tokens[-1] in ends


def _to_end(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The tokens up to the first end token, which is included."""
    stop = next((place for place, token in enumerate(tokens, 1) if token in ends), len(tokens))
    return list(tokens[:stop])
