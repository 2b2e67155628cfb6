# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvfold.methods.base import Forced, LastQueries, Method, Needs, Observation, Stages, register
from kvfold.methods.stages.score.observation_window import check_window, window_votes
from kvfold.methods.stages.select.top import top, with_forced


@register(
    "chunkkv",
    paper="arXiv 2502.00299",
    formula="""
        s[h, t] = Σ_{i in window} a[h, i, t]
        rank of chunk j: by mean s[h, t] of the heads h that hold t,
                         t = j·length … (j + 1)·length − 1
    """,
)
@dataclass(frozen=True)
class ChunkKV(Method):
    """Keeps whole chunks of consecutive tokens, so that phrases survive.

    1. The last `window` queries vote, as in SnapKV, without pooling. After another method, as in
       "knorm + chunkkv", that method scores instead.
    2. Chunks of `length` tokens are ranked by the mean score of their entries in all KV heads.
    3. Whole chunks are kept while they fit. The best tokens of the next chunk fill the budget.

    `shared=false` ranks chunks in each KV head alone. Different from kvpress: it keeps whole chunks
    only, so that its size misses the budget, and it uses row 0's chunks for the whole batch.
    Raises KvfoldError for a window or a length below 1.
    Source: Liu et al., section 3; NVIDIA/kvpress `chunkkv_press.py`.
    """

    length: int = 20  # tokens of a chunk
    shared: bool = True  # one ranking of chunks for all KV heads
    window: int = 32  # last queries that vote; their entries always stay

    def __post_init__(self) -> None:
        check_window(self.window, 1)
        self.check_range(1, None, "length")

    def stages(self) -> Stages:
        return Stages(
            needs=Needs(LastQueries(self.window)),
            score=partial(window_votes, window=self.window, kernel=1, pooling="max"),
            forced=Forced(recent=self.window),
            select=self._select(),
        )

    def brings(self) -> Stages:
        return Stages(select=self._select())

    def _select(self) -> partial[Tensor]:
        return partial(whole_chunks, length=self.length, shared=self.shared)


def whole_chunks(
    observation: Observation,
    scores: Tensor,
    forced: Tensor,
    positions: Tensor,
    counts: Tensor,
    length: int,
    shared: bool,
) -> Tensor:
    """Slots `[B, H, K]` of forced entries and of the best chunks, the last chunk in part.

    scores, forced, positions `[B, H, T]`; counts `[B, H]`, forced ones included. −1 for holes.
    """
    open_ = (positions >= 0) & ~forced
    values, at = scores.masked_fill(~open_, 0), positions.clamp(min=0)
    # By position, as a slot may hold another token in each head.
    none = values.new_zeros(*values.shape[:2], (last := int(at.max())) + 1)
    totals, there = (none.scatter_add(2, at, each) for each in (values, open_.to(values.dtype)))
    if shared:
        totals, there = (each.sum(1, keepdim=True) for each in (totals, there))
        values = (totals / there.clamp(min=1)).expand_as(none).gather(2, at)
    chunk = torch.arange(last + 1, device=at.device).expand_as(totals) // length
    none = totals.new_zeros(*totals.shape[:2], last // length + 1)
    sums, members = (none.scatter_add(2, chunk, each) for each in (totals, there))
    means = (sums / members.clamp(min=1)).masked_fill(members == 0, -torch.inf)
    # Order: by the chunk's mean, then by the entry's own score, then by position.
    by_value = values.argsort(dim=-1, descending=True, stable=True)
    rank_of_chunk = means.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    rank = rank_of_chunk.expand(*values.shape[:2], -1).gather(2, at // length).gather(2, by_value)
    order = by_value.gather(2, rank.argsort(dim=-1, stable=True))
    return top(with_forced(-order.argsort(dim=-1).to(values.dtype), forced, positions), counts)
