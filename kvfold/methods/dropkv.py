# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.methods.base import Forced, LastQueries, Method, Needs, Observation, Stages, register
from kvfold.methods.stages.score.observation_window import check_window, pool

EPSILON = 1e-6  # added to 1 − p, which is 0 for an entry with all of a query's attention


@register(
    "dropkv",
    formula="""
        s[h, t] = mean_{u near t} mean_{q in h} Σ_{i in window} D[q, i, u]²
        D[q, i, u] = A[q, i, u] / (1 − A[q, i, u])·‖o[q, i] − v[h, u]‖
    """,
)
@dataclass(frozen=True)
class DropKV(Method):
    """Keeps the entries whose removal, alone, would change the attention output most.

    1. Evicting an entry of weight p and value v moves a query's output o by p / (1 − p) · (o − v),
       exactly.
    2. The squared changes are summed over the last `window` queries, averaged over the query heads
       of a KV head, and average-pooled with `kernel`.

    `auto` scores by the same change without 1 / (1 − p), takes the root, and max-pools.
    Source: DropKV, OpenReview; NVIDIA/kvpress, branch of the same name.
    """

    by_head: ClassVar[bool] = True
    nested: ClassVar[bool] = True
    window: int = 32  # last queries whose output counts; their entries stay
    kernel: int = 7  # neighbours that changes are averaged over, odd

    def __post_init__(self) -> None:
        check_window(self.window, self.kernel)

    def stages(self) -> Stages:
        return Stages(
            needs=Needs(LastQueries(self.window)),
            score=partial(removal_change, window=self.window, kernel=self.kernel),
            forced=Forced(recent=self.window),
        )


def removal_change(observation: Observation, window: int, kernel: int) -> Tensor:
    """Squared change of the attention output by each entry's eviction `[B, H, T]`, float32.

    Sum over the last `window` queries, mean over the query heads of a group, pooled.
    """
    # Padding first, so that it separates no neighbours in the pooling.
    observation, order = observation.padding_first()
    values = observation.values.float()
    rows = observation.window_attention(window).float()
    rows = rows.unflatten(1, (values.shape[1], -1))  # [B, H, G, W, T]
    outputs = rows @ values[:, :, None]
    # ‖v − o‖² expanded, as the differences would be a tensor [B, H, G, W, T, D].
    distance = values.square().sum(-1)[:, :, None, None] + outputs.square().sum(-1, keepdim=True)
    distance = distance - 2 * outputs @ values[:, :, None].transpose(-1, -2)
    moved = (rows / ((1 - rows).clamp(min=0) + EPSILON)).square() * distance.clamp(min=0)
    scores = pool(moved.sum(3).mean(2), kernel, "avg", observation.positions < 0)
    return scores if order is None else torch.zeros_like(scores).scatter(2, order, scores)
