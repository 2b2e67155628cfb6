# SPDX-License-Identifier: Apache-2.0
"""Retention: the number of KV heads per layer that still store each token after compression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.budget import Budget
from kvfold.hf.user_text import Content
from kvfold.inspect.inspected_text import InspectedText, NeedleSpan
from kvfold.inspect.kept import Positions
from kvfold.methods.base import parse


@dataclass(frozen=True)
class Retention:
    """Entries that `method` kept of N tokens.

    `counts [L, N]` is the number of KV heads that store a token, `heads` the KV heads of each of
    the L layers; `nbytes` and `nbytes_full` are bytes of this cache and of a full one.
    `forced_over_budget`: the budget left no room beside the forced entries.
    """

    method: str
    budget: str
    counts: Tensor
    heads: tuple[int, ...]
    nbytes: int
    nbytes_full: int
    forced_over_budget: bool

    @property
    def shares(self) -> Tensor:
        """Share of a layer's KV heads that store each token, `[L, N]`."""
        return self.counts / torch.tensor(self.heads)[:, None]

    @property
    def kept(self) -> float:
        """Entries stored over entries seen."""
        return int(self.counts.sum()) / (sum(self.heads) * self.counts.shape[1])

    def kept_of(self, needles: Sequence[NeedleSpan]) -> float:
        """Share of the entries inside `needles` (at least one) that is stored."""
        inside = torch.cat([self.counts[:, n.start : n.stop] for n in needles], 1)
        return int(inside.sum()) / (sum(self.heads) * inside.shape[1])


def measure_retention(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    document: InspectedText,
    method: str,
    budget: Budget,
    seed: int = 0,
) -> Retention:
    """Compresses `document` by `method`; a method without budget ignores `budget`.

    Raises what `kvfold.compress` raises.
    """
    limit = budget if parse(method).takes_budget else None
    context = kvfold.compress(
        model,
        tokenizer,
        Content(document.text),
        method,
        limit,
        seed=seed,
        special_tokens=document.special_tokens,
        allow_longer=True,  # the caller has checked the length
    )
    stats = context.stats()
    positions = [context.cache.positions(i) for i in range(len(stats.kept))]
    heads = tuple(len(layer[0]) for layer in positions)
    counts = heads_per_token(positions, document.ids.shape[1])
    sizes = stats.nbytes, stats.nbytes_full
    return Retention(method, stats.budget, counts, heads, *sizes, stats.forced_over_budget)


def heads_per_token(positions: Positions, tokens: int) -> Tensor:
    """Number of KV heads per layer that store each token, `[L, N]`, in the batch's first row."""
    rows = [torch.cat(list(layer[0])).cpu().bincount(minlength=tokens) for layer in positions]
    return torch.stack(rows)
