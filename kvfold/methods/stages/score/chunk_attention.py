# SPDX-License-Identifier: Apache-2.0
"""Score by attention inside chunks without a causal mask, times the value's norm (Compactor)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvfold.methods.observation import Observation
from kvfold.methods.stages.score.observation_window import pool
from kvfold.observers.chunk_sums import ChunkSumsNeed


def non_causal_scores(observation: Observation, among: Tensor | None = None) -> Tensor:
    """Attention inside chunks times ‖v‖, mean over three neighbours: `[B, H, T]`, float32.

    Only entries that `among [B, H, T]` marks take part, None for all; the others score 0. Raises
    KvfoldError for a method that does not need sums inside chunks.
    """
    if among is not None:
        sums = observation[ChunkSumsNeed].masked_fill(~among, 0)
        observed = {**observation.observed, ChunkSumsNeed: sums}
        inner = dataclasses.replace(observation, observed=observed)
        return non_causal_scores(inner).masked_fill(~among, 0)
    observation, order = observation.padding_first()
    sizes = observation.values.float().norm(dim=-1)
    scores = pool(observation[ChunkSumsNeed] * sizes, 3, "avg", observation.positions < 0)
    scores = scores.masked_fill(observation.positions < 0, 0)
    return scores if order is None else torch.zeros_like(scores).scatter(2, order, scores)


def standardized(scores: Tensor, among: Tensor) -> Tensor:
    """Scores `[B, H, T]` less their mean, over their deviation, of the entries `among` of a row."""
    count = among.flatten(1).sum(1).view(-1, 1, 1)
    mean = scores.masked_fill(~among, 0).sum((1, 2), keepdim=True) / count.clamp(min=1)
    apart = (scores - mean).masked_fill(~among, 0)
    variance = apart.square().sum((1, 2), keepdim=True) / (count - 1).clamp(min=1)
    return apart / variance.sqrt().clamp(min=1e-6)
