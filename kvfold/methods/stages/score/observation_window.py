# SPDX-License-Identifier: Apache-2.0
"""Score by votes of the observation window, pooled over neighbours (SnapKV)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.methods.observation import Observation

Pooling = Literal["max", "avg"]


def window_votes(
    observation: Observation, window: int, kernel: int, pooling: Pooling, pool_first: bool = False
) -> Tensor:
    """Votes `[B, H, T]`: attention of the last `window` queries, summed, group mean, pooled.

    The window's own entries score 0, as they are forced. `pool_first` pools each query head before
    the group mean, as kvpress does. Source: FasterDecoding/SnapKV `snapkv_utils.py`.
    """
    observation, order = observation.padding_first()
    votes = observation.window_attention(window).sum(2)[..., :-window]
    if not pool_first:
        votes = observation.group_mean(votes)
    per_head = votes.shape[1] // observation.positions.shape[1]
    padding = (observation.positions < 0).repeat_interleave(per_head, 1)[..., :-window]
    pooled = pool(votes, kernel, pooling, padding)
    if pool_first:
        pooled = observation.group_mean(pooled)
    scores = F.pad(pooled, (0, observation.keys.shape[2] - pooled.shape[-1]))
    return scores if order is None else torch.zeros_like(scores).scatter(2, order, scores)


def mean_votes(
    observation: Observation, window: int, kernel: int, pooling: Pooling, pool_first: bool = False
) -> Tensor:
    """Votes `[B, H, T]` as of `window_votes`, a query on average: the mean, not the sum.

    Both rank alike; methods that add to a score (CriticalKV) expect the mean. A row of fewer tokens
    than the window has fewer queries.
    """
    votes = window_votes(observation, window, kernel, pooling, pool_first)
    assert observation.query_positions is not None
    asked = (observation.query_positions[:, -window:] >= 0).sum(-1)
    return votes / asked.clamp(min=1).view(-1, 1, 1)


def candidate_votes(observation: Observation, window: int, kernel: int, pooling: Pooling) -> Tensor:
    """Votes `[B, H, T]` of the last `window` queries, shared among the entries before the window.

    Each query votes by the largest logit of the KV head's query heads; softmax over the entries
    before the window, mean over the queries, pooled. The window's own entries score 0, as they are
    forced. Source: Zefan-Cai/R-KV `r1_kv.py`.
    """
    observation, order = observation.padding_first()
    assert observation.query_positions is not None
    padding = (observation.positions < 0)[..., :-window]
    logits = observation.window_logits(window).amax(2)[..., :-window]  # [B, H, W, T]
    rows = logits.masked_fill(padding[:, :, None], -torch.inf).softmax(-1)
    asked = observation.query_positions[:, -window:] >= 0
    rows = rows.masked_fill(~asked[:, None, :, None] | padding[:, :, None], 0)
    votes = rows.sum(2) / asked.sum(-1).clamp(min=1).view(-1, 1, 1)
    pooled = pool(votes, kernel, pooling, padding).masked_fill(padding, 0)
    scores = F.pad(pooled, (0, observation.keys.shape[2] - pooled.shape[-1]))
    return scores if order is None else torch.zeros_like(scores).scatter(2, order, scores)


def pool(scores: Tensor, kernel: int, pooling: Pooling, padding: Tensor | None = None) -> Tensor:
    """Pooled scores of the same shape, along the last axis; `padding` counts as outside.

    "avg" pads with zeros and always divides by `kernel`; "max" pads with −∞. Raises KvfoldError for
    a kernel that is not odd and positive.
    """
    check_window(1, kernel)
    if kernel == 1 or scores.shape[-1] == 0:
        return scores
    outside = -torch.inf if pooling == "max" else 0.0
    if padding is not None:
        scores = scores.masked_fill(padding, outside)
    # This width reaches every entry from any other: a wider kernel pools the same.
    width = min(kernel, 2 * scores.shape[-1] - 1)
    if pooling == "max":
        return F.max_pool1d(scores, width, 1, width // 2)
    return F.avg_pool1d(scores, width, 1, width // 2) * (width / kernel)


def check_window(window: int, kernel: int) -> None:
    """Raises KvfoldError for a window below 1 query, or a kernel that is not odd and positive."""
    if window < 1:
        raise KvfoldError(f"an observation window is at least 1 query, not {window}")
    if kernel < 1 or kernel % 2 == 0:
        raise KvfoldError(f"a pooling kernel is odd and positive, not {kernel}")
