# SPDX-License-Identifier: Apache-2.0
"""Streaming runs: perplexity of a text read token by token, with eviction after each."""

from __future__ import annotations

import math
import time

from transformers import PreTrainedModel

from kvfold.budget import Budget
from kvfold.cache.cache import CompressedCache
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.likelihood import token_by_token
from kvfold.eval.run.outcome import cache_usage
from kvfold.eval.run.prompt import SamplePrompt
from kvfold.eval.run.sample_result import SampleOutcome, ScoredAnswer


def run_streaming(model: PreTrainedModel, prompt: SamplePrompt, cell: EvalCell) -> SampleOutcome:
    """Outcome of a streamed text, with its negative log-likelihood.

    A budget given as a ratio is taken of the whole text. Raises KvfoldError if the text is longer
    than the protocol's `max_length`.
    """
    length, budget = prompt.ids.shape[1], None if cell.budget is None else Budget.of(cell.budget)
    if length > cell.protocol.max_length:
        raise KvfoldError(f"takes {length} tokens, {cell.protocol.max_length} are the limit")
    if budget is not None and budget.kind == "ratio":
        budget = Budget.tokens(max(1, math.floor(budget.amount * length + 1e-9)))
    seed = cell.seed + prompt.sample.index
    cache = CompressedCache(model, cell.method, budget, tokenizer=prompt.tokenizer, seed=seed)
    began = time.perf_counter()
    answer = ScoredAnswer.of_text(token_by_token(model, cache, prompt.ids.to(model.device)))
    (held,) = cache_usage(cache.stats())
    return SampleOutcome(
        answers=(answer,),
        tokens=length,
        left_out=0,
        held=held,
        prefill_seconds=0.0,
        answer_seconds=time.perf_counter() - began,
    )
