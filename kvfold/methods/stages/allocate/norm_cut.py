# SPDX-License-Identifier: Apache-2.0
"""Allocation without a budget: evict until attention has lost a share of its norm (DBudgetKV)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.uniform import named_layers
from kvfold.methods.stages.score.observation_window import window_votes

Ranking = Literal["position", "attention"]
KEEP_LAYERS = (0, 1)  # by default, of a model that has as many
VOTERS = 8  # queries that rank by attention; their own entries stay


def norm_cut(
    observation: Observation,
    *,
    threshold: float = 0.01,
    sinks: int = 4,
    rows: int = 1,
    include_sinks: bool = False,
    keep_layers: tuple[int, ...] = KEEP_LAYERS,
    ranking: Ranking = "position",
) -> Tensor:
    """Sizes `[B]`, entries per head, at which attention keeps all but `threshold` of its norm.

    Candidates are evicted from the least important on: by position the oldest that is no sink, by
    attention the one with the fewest votes of the last `VOTERS` queries. The norm is that of the
    last query's attention to the candidates, or with `include_sinks` to all entries. With several
    `rows` the last queries' attention to an entry is averaged over those that see it. Norms are
    averaged over the query heads, so all heads keep equally many. `keep_layers` evict nothing;
    negative ones count from the end. Raises KvfoldError for a layer that there is not.

    Source: Ni et al., algorithm 1 (arXiv 2502.16886); Patrick-Ni/ReFreeKV `dynamic_metrics.py`.
    """
    observation, _ = observation.padding_first()
    stored = (observation.positions >= 0).sum(-1).amax(-1)
    if observation.layers == 1 and keep_layers == KEEP_LAYERS:
        keep_layers = KEEP_LAYERS[:1]
    if observation.layer in named_layers(keep_layers, observation.layers, "dbudgetkv:keep_layers"):
        return stored
    importance = (
        by_position(observation, sinks) if ranking == "position" else by_attention(observation)
    )
    return stored - evictable(_last_rows(observation, rows), importance, threshold, include_sinks)


def by_attention(observation: Observation) -> Tensor:
    """Importance `[B, H, T]`: votes of the last `VOTERS` queries, +inf for their entries."""
    votes = window_votes(observation, VOTERS, kernel=1, pooling="max")
    last = torch.arange(votes.shape[-1], device=votes.device) >= votes.shape[-1] - VOTERS
    return votes.masked_fill(last | (observation.positions < 0), torch.inf)


def by_position(observation: Observation, sinks: int) -> Tensor:
    """Importance `[B, H, T]`: the position, higher for newer tokens; +inf for sinks and padding."""
    return observation.positions.double().masked_fill(observation.positions < sinks, torch.inf)


def evictable(
    attention: Tensor, importance: Tensor, threshold: float, include_kept: bool
) -> Tensor:
    """Number `[B]` of each head's least important entries that may be evicted.

    attention `[B, Hq, T]`; importance `[B, H, T]`, +inf for entries that always stay, which count
    in the norm only with `include_kept`. The most important candidate stays as well.
    """
    squares = attention.double().square()
    groups = attention.shape[1] // importance.shape[1]
    stays = importance == torch.inf
    if not include_kept:
        squares = squares.masked_fill(stays.repeat_interleave(groups, 1), 0.0)
    # Reversed, so that of equal ones the later is evicted first, as the selection does.
    order = importance.argsort(dim=-1, descending=True, stable=True).flip(-1)
    ascending = squares.gather(2, order.repeat_interleave(groups, 1))
    norms = ascending.flip(-1).cumsum(-1).flip(-1).sqrt().mean(1)
    gone = torch.arange(norms.shape[-1], device=norms.device)
    candidates = (~stays).sum(-1).amin(-1, keepdim=True)
    # Not divided by the norm, which is 0 if only sinks receive attention.
    within = norms[:, :1] - norms <= threshold * norms[:, :1]
    return (gone * (within & (gone < candidates))).amax(-1)


def _last_rows(observation: Observation, rows: int) -> Tensor:
    attention = observation.window_attention(rows)
    return attention.sum(2) / (attention != 0).sum(2).clamp(min=1)
