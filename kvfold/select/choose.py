# SPDX-License-Identifier: Apache-2.0
"""From what a layer observed to the slots that stay."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.method import Stages
from kvfold.observation import Observation
from kvfold.select.forced import with_forced
from kvfold.select.top import top


@dataclass(frozen=True)
class Chosen:
    """Slots `[B, H, K]` ascending, −1 for holes; whether more was forced than the budget allows."""

    slots: Tensor
    over_budget: bool


def choose(
    stages: Stages, seen: Observation, places: Tensor, forced: Tensor, counts: Tensor
) -> Chosen:
    """Which of the entries stay.

    places `[B, H, T]` number each row's tokens, −1 for padding; forced `[B, H, T]` stay beside
    those that the method forces; counts, `[B]` or `[B, H]`, are the entries to keep, forced ones
    included.
    """
    per_row = counts if counts.dim() == 1 else counts.amax(-1)
    forced = forced | stages.forced.mask(places, per_row)
    scores = _scores(stages, dataclasses.replace(seen, budget=per_row), places.shape[1])
    needed = forced.sum(-1)
    counts = counts.view(len(counts), -1).expand_as(needed)
    over = bool((needed > counts).any())
    if stages.heads is not None:
        open_ = scores.masked_fill(forced | (places < 0), -torch.inf)
        counts = needed + stages.heads(open_, (counts - needed).clamp(min=0).amin(-1))
    counts = torch.minimum(torch.maximum(counts, needed), (places >= 0).sum(-1))
    return Chosen(top(with_forced(scores, forced, places), counts), over)


def _scores(stages: Stages, seen: Observation, heads: int) -> Tensor:
    """Scores `[B, H, T]` of the stored heads: the mean over the heads that share a latent."""
    assert stages.score is not None
    seen, order = seen.padding_first()
    scores = stages.score(seen)
    if order is not None:
        scores = torch.zeros_like(scores).scatter(2, order, scores)
    return scores.unflatten(1, (heads, -1)).mean(2)
