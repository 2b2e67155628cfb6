# SPDX-License-Identifier: Apache-2.0
"""Streaming runs: perplexity of texts read token by token, with eviction after each."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from kvfold.budget import Budget
from kvfold.cache.cache import CompressedCache
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.likelihood import token_by_token
from kvfold.eval.run.outcome import batch_outcomes, cache_usage
from kvfold.eval.run.prompt import SamplePrompt
from kvfold.eval.run.sample_result import SampleOutcome, ScoredAnswer
from kvfold.measure.cost import Cost


def run_streaming(
    model: PreTrainedModel, prompts: Sequence[SamplePrompt], cell: EvalCell
) -> list[SampleOutcome]:
    """Outcomes of streamed texts, each with its negative log-likelihood.

    Texts of one length are read together. A budget given as a ratio is taken of the whole text.
    Raises KvfoldError if a text is longer than the protocol's `max_length`.
    """
    found: dict[int, SampleOutcome] = {}
    lengths = [prompt.ids.shape[1] for prompt in prompts]
    for length in dict.fromkeys(lengths):
        rows = [row for row, own in enumerate(lengths) if own == length]
        read = _read_together(model, [prompts[row] for row in rows], length, cell)
        found |= zip(rows, read, strict=True)
    return [found[row] for row in range(len(prompts))]


def _read_together(
    model: PreTrainedModel, prompts: Sequence[SamplePrompt], length: int, cell: EvalCell
) -> list[SampleOutcome]:
    """Outcomes of texts of `length` tokens."""
    budget = cell.budget_of(len(prompts))
    if length > cell.protocol.max_length:
        raise KvfoldError(f"takes {length} tokens, {cell.protocol.max_length} are the limit")
    if budget is not None and budget.kind == "ratio":
        budget = Budget.tokens(max(1, math.floor(budget.amount * length + 1e-9)))
    first = prompts[0]
    seed = cell.seed + first.sample.index
    cache = CompressedCache(model, cell.method, budget, tokenizer=first.tokenizer, seed=seed)
    began = time.perf_counter()
    losses = token_by_token(model, cache, torch.cat([p.ids for p in prompts]).to(model.device))
    answers = [[ScoredAnswer.of_text(row)] for row in losses]
    seconds = time.perf_counter() - began
    return batch_outcomes(prompts, answers, cache_usage(cache), Cost(), seconds, None)
