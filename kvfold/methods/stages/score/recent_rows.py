# SPDX-License-Identifier: Apache-2.0
"""Scores by the attention rows of the last queries, a few of which exist at once (Scissorhands)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from kvfold.methods.observation import Observation
from kvfold.observers.stored import PreviousScores

BLOCK = 32  # queries whose attention rows exist at once


def seldom_below_average(observation: Observation, window: int) -> Tensor:
    """Minus the number of queries that gave an entry less than the average, `[B, H, T]`."""
    scores = torch.zeros(
        observation.positions.shape, dtype=torch.float32, device=observation.positions.device
    )
    for rows, seen in _blocks(observation, window):
        average = 1 / seen.sum(-1, keepdim=True).clamp(min=1)
        below = (rows < average[:, :, None]) & seen[:, :, None]
        scores -= below.sum(3).float().mean(2)
    return scores


def lasting_attention(observation: Observation, window: int, decay: float) -> Tensor:
    """Attention of the last queries `[B, H, T]`, summed, and `decay` times the last scores."""
    scores = decay * observation[PreviousScores].float()
    for rows, _ in _blocks(observation, window):
        scores += rows.sum(3).float().mean(2)
    return scores


def _blocks(observation: Observation, window: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Attention `[B, H, G, W, T]` of a few queries at once, and what they see `[B, H, W, T]`."""
    assert observation.queries is not None and observation.query_positions is not None
    positions = observation.positions[:, :, None]
    blocks = zip(
        observation.queries[:, :, -window:].split(BLOCK, 2),
        observation.query_positions[:, -window:].split(BLOCK, 1),
        strict=True,
    )
    for queries, at in blocks:
        part = dataclasses.replace(observation, queries=queries, query_positions=at, attention=None)
        seen = (positions >= 0) & (positions <= at[:, None, :, None])
        yield part.window_attention(part.window).unflatten(1, (positions.shape[1], -1)), seen
