# SPDX-License-Identifier: Apache-2.0
"""Allocation by retrieval heads, which keep everything, and streaming heads (DuoAttention)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.fitted.numbers import Fitted
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.pool import apart, together
from kvfold.methods.stages.allocate.rounding import UNLIMITED
from kvfold.observers.fitted import HeadNumbers


@dataclass(frozen=True, eq=False)
class RetrievalScores(Fitted):
    """Scores `[L, H]` of KV heads from 0 to 1: the higher, the farther a head looks back."""

    method: ClassVar[str] = "duo"
    command: ClassVar[str] = "kvfold fit MODEL TEXTS --scorer duo"
    bundled: ClassVar[str] = "heads.safetensors"
    tables: ClassVar[tuple[str, ...]] = (".tsv", ".txt")
    axes: ClassVar[dict[str, str]] = {"heads": "LH"}
    heads: Tensor

    def of_layer(self, layer: int, heads: slice | None = None) -> Tensor:
        """Scores `[H]` of one layer, of its KV heads `heads` (None: all)."""
        return self.heads[layer, heads or slice(None)]


def retrieval_scores(observation: Observation) -> Tensor:
    """Scores `[B, H]` of a layer's KV heads, the same in all rows."""
    return observation[HeadNumbers].to(observation.keys.device).expand(len(observation.keys), -1)


def above(
    scores: list[Tensor], budget: Tensor, seen: Tensor, *, window: int, threshold: float
) -> list[Tensor]:
    """Sizes `[B, H]` of each layer: no limit for heads of at least `threshold`, else `window`.

    scores: `[B, H]` of each layer; the other arguments are not used.
    Source: Xiao et al., section 2.3 (arXiv 2410.10819).
    """
    return [torch.where(layer >= threshold, UNLIMITED, window) for layer in scores]


def above_quantile(
    scores: list[Tensor], budget: Tensor, seen: Tensor, *, window: int, sparsity: float
) -> list[Tensor]:
    """Sizes `[B, H]` of each layer: no limit for heads from the `sparsity` quantile of all on.

    scores: `[B, H]` of each layer; `window` is the size of the others, and of all at a sparsity of
    1. Quantiles between two heads are interpolated; the released code adds noise of 1e-6, by which
    equal heads part.
    Source: mit-han-lab/duo-attention `duo_attn/utils.py`, `sparsify_attention_heads`.
    """
    every = together(scores).double()
    least = every.quantile(sparsity, dim=-1, keepdim=True)
    if sparsity >= 1:  # the quantile is the best head's own score
        least = torch.full_like(least, torch.inf)
    return [
        torch.where(layer.double() >= least.to(layer.device), UNLIMITED, window) for layer in scores
    ]


def fitting(scores: list[Tensor], budget: Tensor, seen: Tensor, *, window: int) -> list[Tensor]:
    """Sizes `[B, H]` of each layer: no limit for as many of the best heads as the budget holds.

    scores: `[B, H]` of each layer; `budget [B]` entries per head and layer, `seen [B]` tokens. The
    others have `window` entries, or the budget if that is less. Of equal heads the earlier wins.
    """
    every = together(scores)
    heads, budget, seen = every.shape[1], budget.to(every.device), seen.to(every.device)
    least = budget.clamp(max=window)
    more = (seen - least).clamp(min=0)  # entries of a retrieval head beyond those of the others
    holds = torch.where(more > 0, heads * (budget - least) // more.clamp(min=1), heads)
    rank = every.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    sizes = torch.where(rank < holds[:, None], UNLIMITED, least[:, None])
    return apart(sizes, scores, [layer.shape[1] for layer in scores])
