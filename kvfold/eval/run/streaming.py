# SPDX-License-Identifier: Apache-2.0
"""Streaming runs: perplexity of texts read token by token, with eviction after each; −log p."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.budget import Budget
from kvfold.cache.cache import CompressedCache
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.outcome import batch_outcomes, cache_usage
from kvfold.eval.run.prompt import SamplePrompt
from kvfold.eval.run.sample_result import SampleOutcome, ScoredAnswer
from kvfold.hf.models import read_logits
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


@torch.no_grad()
def token_by_token(model: PreTrainedModel, cache: CompressedCache, ids: Tensor) -> Tensor:
    """−log p in nats of all tokens of `ids [B, S]` but the first, `[B, S − 1]`.

    One forward per token, so that the cache evicts after each as in decoding (StreamingLLM, arXiv
    2309.17453, `examples/eval_long_ppl.py`); one forward over the whole text would evict nothing.
    """
    found = []
    for index in range(ids.shape[1] - 1):
        logits = read_logits(model, ids[:, index : index + 1], cache, None, 1)
        found.append(_nll(logits, ids[:, index + 1 : index + 2]))
    return torch.cat(found, 1)


@torch.no_grad()
def at_once(model: PreTrainedModel, cache: CompressedCache, ids: Tensor) -> Tensor:
    """−log p in nats of all tokens of `ids [1, S]` but the first, given the cache, `[S − 1]`.

    The cache must be frozen or a fork, else the text would be compressed as a turn.
    """
    logits = read_logits(model, ids, cache, None, ids.shape[1])
    return _nll(logits[:, :-1], ids[:, 1:])[0]


def _nll(logits: Tensor, following: Tensor) -> Tensor:
    """−log p in nats `[B, S]` of the tokens `following [B, S]` under `logits [B, S, V]`."""
    return -logits.float().log_softmax(-1).gather(-1, following[..., None])[..., 0]
