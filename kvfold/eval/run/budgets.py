# SPDX-License-Identifier: Apache-2.0
"""A context compressed to several budgets, from one prefill where that is exact."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from kvfold.bench.clock import seconds, synchronize
from kvfold.cache.cache import CompressedCache
from kvfold.contexts.context import Context, check_reusable
from kvfold.eval.run.prompt import SamplePrompt
from kvfold.generation.generate import read_on, read_turn
from kvfold.hf.models import caches_latents


class CompressedToBudget(NamedTuple):
    """A context at one budget, and the seconds of its prefill and compression."""

    budget: str | None
    context: Context
    seconds: float


@torch.no_grad()
def compressed(
    model: PreTrainedModel,
    prompt: SamplePrompt,
    method: str,
    budgets: Sequence[str | None],
    seed: int,
) -> Iterator[CompressedToBudget]:
    """The prompt's context compressed by `method` to each of `budgets`, in any order.

    Scores do not depend on the budget, so one prefill (and one repetition for KVzip) serves all
    budgets, each of which compresses a copy. Methods that compress inside the forward (token
    pruning between layers) and latent caches (MLA) need one prefill per budget. Raises what
    `kvfold.compress` raises.
    """
    ids, length = prompt.ids.to(model.device), prompt.ids.shape[1]

    def new(budget: str | None) -> CompressedCache:
        made = CompressedCache(model, method, budget, tokenizer=prompt.tokenizer, seed=seed)
        check_reusable(made.method)
        return made

    def context(cache: CompressedCache) -> Context:
        return Context(model, prompt.tokenizer, cache, prompt.frame, ids)

    # Every budget is checked before the prefill.
    cache, *_ = [new(budget) for budget in budgets]
    inside = cache.method.stages().token_pruning is not None or caches_latents(model)
    if len(budgets) == 1 or inside:
        for budget in budgets:
            cache = new(budget)
            took = seconds(
                model.device, partial(read_turn, model, cache, ids, None, length, length)
            )
            yield CompressedToBudget(budget, context(cache), took)
        return
    with cache.reading():
        reading = seconds(model.device, lambda: read_on(model, cache, ids, None, length))
        for budget in filter(None, budgets[1:]):
            copies: list[CompressedCache] = []
            took = seconds(model.device, lambda: copies.append(cache.to_budget(budget)))  # noqa: B023
            yield CompressedToBudget(budget, context(copies.pop()), reading + took)
        began = time.perf_counter()
    synchronize(model.device)
    yield CompressedToBudget(budgets[0], context(cache), reading + time.perf_counter() - began)
