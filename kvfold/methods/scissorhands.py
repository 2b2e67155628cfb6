# SPDX-License-Identifier: Apache-2.0
import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.methods.base import Method, Stages, register
from kvfold.methods.observation import Needs, Observation
from kvfold.methods.stages.score.observation_window import check_window
from kvfold.methods.stages.select.forced import Forced

BLOCK = 32  # queries whose attention rows exist at once


@register(
    "scissorhands",
    paper="arXiv 2305.17118",
    formula="""
        s[h, t] = −|{i in window: t <= i, a[h, i, t] < 1/n[i]}|,  n[i]: entries that query i sees
    """,
)
@dataclass(frozen=True)
class Scissorhands(Method):
    """Evicts the entries that recent queries most often gave less than the average attention.

    1. For each of the last `window` queries, an entry is counted if its attention is below the mean
       of all entries that the query sees; the mean of a KV head's query heads.
    2. The newest `recent` entries and those of lowest counts stay; of equal ones the older. At the
       prompt's end, and after each 128 generated tokens (another number:
       "scissorhands + every:interval=64").

    Different from the paper: the size is the budget after each eviction, and attention is that to
    the entries stored then. Raises KvfoldError for options out of range.
    Source: Liu et al., section 4, algorithm 2.
    """

    by_head: ClassVar[bool] = True
    window: int = 400  # last queries that count
    recent: int = 10  # newest entries that always stay
    decode: Literal["every", "append"] = "every"  # evicts generated tokens in rounds, or adds them

    def __post_init__(self) -> None:
        check_window(self.window, 1)
        if self.recent < 0:
            raise KvfoldError(f"scissorhands:recent is 0 or more entries, not {self.recent}")

    def stages(self) -> Stages:
        return Stages(
            needs=Needs(window=self.window),
            score=partial(seldom_below_average, window=self.window),
            forced=Forced(recent=self.recent),
            decode=self.decode,
            every=128 if self.decode == "every" else 0,
        )


def seldom_below_average(observation: Observation, window: int) -> Tensor:
    """Minus the number of queries that gave an entry less than the average, `[B, H, T]`."""
    assert observation.queries is not None and observation.query_positions is not None
    positions = observation.positions[:, :, None]
    scores = torch.zeros(observation.positions.shape, device=positions.device)
    blocks = zip(
        observation.queries[:, :, -window:].split(BLOCK, 2),
        observation.query_positions[:, -window:].split(BLOCK, 1),
        strict=True,
    )
    for queries, at in blocks:
        part = dataclasses.replace(observation, queries=queries, query_positions=at, attention=None)
        seen = (positions >= 0) & (positions <= at[:, None, :, None])  # [B, H, W, T]
        average = 1 / seen.sum(-1, keepdim=True).clamp(min=1)
        rows = part.window_attention(BLOCK).unflatten(1, (positions.shape[1], -1))
        below = (rows < average[:, :, None]) & seen[:, :, None]
        scores -= below.sum(3).float().mean(2)
    return scores
