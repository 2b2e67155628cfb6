# SPDX-License-Identifier: Apache-2.0
"""One reading of a prompt by a method, compressed to any number of budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.cache.cache import CompressedCache
from kvfold.cache.fork import fork
from kvfold.checks.encoded import EncodedPrompt
from kvfold.generation.generate import generate, read_on, read_turn
from kvfold.hf.models import caches_latents
from kvfold.methods.base import Method

# A method and its budget, both as text; None for a method without budget.
MethodAtBudget = tuple[str, str | None]


@dataclass(frozen=True)
class CompressedPrompt:
    """A prompt whose first `read` tokens are in `cache`, compressed."""

    prompt: EncodedPrompt
    cache: CompressedCache
    read: int

    @property
    def stepwise(self) -> bool:
        """True if the cache changes while an answer is written, so that this one is used up by it.

        Forced tokens are then read one by one. A context that was compressed before its question
        never changes, as in `kvfold.compress`.
        """
        stages = self.cache.method.stages()
        changes = stages.decode != "append" or stages.encode is not None
        return self.prompt.context is None and changes

    @torch.no_grad()
    def logits(self, model: PreTrainedModel, forced: torch.Tensor) -> torch.Tensor:
        """Logits `[S or S − 1, V]` that predict `forced [1, S]`.

        The first is missing where all of the prompt was compressed at once: it came before.
        Read into the cache if `stepwise`, else into a fork, in one forward.
        """
        rest = self.prompt.ids[:, self.read :].to(forced.device)
        fed = torch.cat([rest, forced[:, :-1]], 1)
        count = forced.shape[1] - (rest.shape[1] == 0)
        if count == 0:
            return torch.empty(0, model.config.get_text_config().vocab_size)
        if not self.stepwise:
            return _logits(model, fork(self.cache), fed, count)
        steps = [_logits(model, self.cache, fed[:, i : i + 1], 1) for i in range(fed.shape[1])]
        return torch.cat(steps[-count:])

    def answer(
        self, model: PreTrainedModel, known: Sequence[int], limit: int, ends: list[int]
    ) -> list[int]:
        """Greedy answer of at most `limit` tokens, end token included, that begins with `known`.

        The first token must be known where all of the prompt was compressed at once.
        """
        if known and (known[-1] in ends or len(known) >= limit):
            return list(known)[:limit]
        ids = torch.cat([self.prompt.ids, torch.tensor([list(known)], dtype=torch.long)], 1)
        out = generate(
            model,
            ids.to(model.device),
            cache=self.cache if self.stepwise else fork(self.cache),
            do_sample=False,
            max_new_tokens=limit - len(known),
        )
        return [*known, *(int(token) for token in out[0, ids.shape[1] :])]


class PromptReading:
    """A prompt as one method reads it, once where scores do not depend on the budget.

    Methods that compress inside the forward (token pruning between layers), latent caches (MLA) and
    methods without a budget read it again each time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompt: EncodedPrompt,
        method: Method,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.prompt, self.method = prompt, method
        self._open: CompressedCache | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held for further budgets."""
        return 0 if self._open is None else self._open.stats().nbytes

    def release(self) -> None:
        """Drops what is held; the next budget reads the prompt again."""
        self._open = None

    @torch.no_grad()
    def at(self, budget: str | None) -> CompressedPrompt:
        """The prompt compressed to a budget; raises what `CompressedCache` raises."""
        again = self.method.stages().token_pruning is not None or caches_latents(self.model)
        if budget is not None and not again:
            if self._open is None:
                self._open = self._read(budget)
            cache = self._open.to_budget(budget)
            return CompressedPrompt(self.prompt, cache, cache.get_seq_length())
        cache = self._new(budget)
        ids = self._ids(cache)
        read_turn(self.model, cache, ids, None, ids.shape[1], ids.shape[1])
        return CompressedPrompt(self.prompt, cache, ids.shape[1])

    def _read(self, budget: str) -> CompressedCache:
        """A cache that has read the prompt and whose prefill stays open."""
        cache = self._new(budget)
        ids = self._ids(cache)
        # Left open: the cache is only copied, and dropped with its prefill unfinished.
        cache.phase.reading = True
        read_on(self.model, cache, ids, None, ids.shape[1])
        return cache

    def _new(self, budget: str | None) -> CompressedCache:
        return CompressedCache(
            self.model, self.method, budget, tokenizer=self.tokenizer, seed=self.prompt.seed
        )

    def _ids(self, cache: CompressedCache) -> torch.Tensor:
        """The tokens to compress: the context; or all, less the last for a method's own forwards.

        Those forwards come before the first answer token is predicted, as in `kvfold.generate`.
        """
        whole = self.prompt.ids.shape[1] - cache.runs_own_forwards
        return self.prompt.ids[:, : self.prompt.context or whole].to(self.model.device)


@torch.no_grad()
def read_full(model: PreTrainedModel, prompt: EncodedPrompt, chunk: int | None) -> CompressedPrompt:
    """The prompt in a full cache, its last token left to read at least; in pieces of `chunk`."""
    cache = CompressedCache(model, "full")
    read = min(prompt.context or prompt.ids.shape[1], prompt.ids.shape[1] - 1)
    ids = prompt.ids[:, :read].to(model.device)
    read_turn(model, cache, ids, None, read, chunk or read)
    return CompressedPrompt(prompt, cache, read)


def _logits(
    model: PreTrainedModel, cache: CompressedCache, ids: torch.Tensor, count: int
) -> torch.Tensor:
    """Logits `[count, V]` of the last tokens of `ids [1, S]`."""
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=count)
    logits: torch.Tensor = out.logits[0]
    return logits
