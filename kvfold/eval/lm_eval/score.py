# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods from a compressed cache: of continuations, and of texts token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.budget import Budget
from kvfold.cache.cache import CompressedCache
from kvfold.errors import KvfoldError
from kvfold.generation.reading import read_turn
from kvfold.hf.versions import CACHE
from kvfold.methods.base import Method
from kvfold.methods.stages.when import Once


@dataclass(frozen=True)
class ScoringSplit:
    """Token ids of a context and its continuation, split for scoring.

    prefill: the context without its last token; it is compressed.
    scored_input: the context's last token and the continuation without its last token, the input
        of the scoring forward. So all continuation tokens are predicted from the compressed cache.
    continuation: the tokens scored.
    truncated: number of context tokens truncated on the left.
    """

    prefill: tuple[int, ...]
    scored_input: tuple[int, ...]
    continuation: tuple[int, ...]
    truncated: int

    @classmethod
    def of(
        cls, context: Sequence[int], continuation: Sequence[int], max_length: int
    ) -> ScoringSplit:
        """The split, with the context truncated on the left to at most `max_length` input tokens.

        Raises KvfoldError for an empty context or continuation, and for a continuation longer than
        `max_length`.
        """
        if not context or not continuation:
            raise KvfoldError("a context and a continuation have at least one token each")
        if len(continuation) > max_length:
            raise KvfoldError(
                f"a continuation of {len(continuation)} tokens does not fit into the model's "
                f"{max_length}: choose a model or a max_length= that it fits into"
            )
        whole = (*context, *continuation)
        shown = whole[-(max_length + 1) :]
        start = len(shown) - len(continuation) - 1
        truncated = len(whole) - len(shown)
        return cls(shown[:start], shown[start:-1], shown[start + 1 :], truncated)


def check_crops(method: Method) -> None:
    """Raises KvfoldError if the method compresses at the first decode step.

    Scoring crops each continuation from the cache, which such a compression would not survive.
    """
    if isinstance(method.stages().when, Once):
        raise KvfoldError(
            f"{method} compresses at the first generated token, but a scored continuation is "
            "removed from the cache again: choose a variant that compresses when the prompt ends"
        )


@torch.no_grad()
def log_probs(
    model: PreTrainedModel, cache: CompressedCache, inputs: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Log-probabilities `[S, V]` of the token after each of `inputs [1, S]`.

    Nothing is evicted, and the cache is cropped back, so all continuations see the same compressed
    context.
    """
    with cache.frozen():
        logits: Tensor = model(inputs, use_cache=True, **{CACHE: cache}).logits
        cache.crop(-inputs.shape[1])
    return F.log_softmax(logits[0], -1, dtype=dtype)


def prefill(model: PreTrainedModel, cache: CompressedCache, ids: Tensor) -> None:
    """Prefill of a new cache with `ids [1, N]`, compressed; no effect if N is 0."""
    if ids.shape[1] > 0:
        read_turn(model, cache, ids)


def check_evicts_while_streaming(method: Method, budget: Budget | None) -> None:
    """Raises KvfoldError if nothing would be evicted while a text is read token by token.

    The full cache passes: it is not meant to evict.
    """
    stages = method.stages()
    if stages.score is None and stages.encode is None and stages.token_pruning is None:
        return
    if not stages.evicts_while_decoding:
        raise KvfoldError(
            f"{method} compresses when a prompt ends, and a text scored token by token has "
            "none: its perplexity would be the full cache's. Choose a method that evicts while "
            "decoding, such as streaming_llm, h2o or tova"
        )
    if budget is not None and budget.kind == "ratio":
        raise KvfoldError(
            f"a budget of {budget} is counted when a prompt ends, and a text scored token by "
            "token has no prompt: give the budget in tokens or bytes"
        )


@torch.no_grad()
def stream(
    model: PreTrainedModel,
    cache: CompressedCache,
    ids: Tensor,
    scored: int,
    dtype: torch.dtype | None = None,
) -> float:
    """Log-likelihood of the last `scored` tokens of `ids [1, N]`, read token by token.

    The cache evicts to its budget after each token (Xiao et al., arXiv 2309.17453, section 4.1;
    mit-han-lab/streaming-llm `examples/eval_long_ppl.py`).
    """
    total, first = 0.0, ids.shape[1] - scored
    for place in range(1, ids.shape[1]):
        step = ids[:, place - 1 : place]
        logits = model(step, use_cache=True, **{CACHE: cache}).logits[0, -1]
        if place >= first:
            total += float(F.log_softmax(logits, -1, dtype=dtype)[ids[0, place]])
    return total
