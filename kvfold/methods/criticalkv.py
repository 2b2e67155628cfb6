# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from kvfold.methods.base import Forced, LastQueries, Method, Needs, Select, Stages, register
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.rounding import ROUNDING
from kvfold.methods.stages.score.observation_window import Pooling, check_window, mean_votes
from kvfold.methods.stages.select.top import highest, top, with_forced
from kvfold.observers.stored import OutputNorm, OutputNorms


@register(
    "criticalkv",
    paper="arXiv 2502.03805",
    presets={"summed": {"epsilon": 1e-4 / 32}},
    formula="""
        kept = the ⌊first·b⌋ best by s[h, t], then the best by
        (s[h, t] + epsilon)·mean_{q in h} ‖W_o[q]·v[h, t]‖
    """,
)
@dataclass(frozen=True)
class CriticalKV(Method):
    """Keeps half by score, and half by score times the norm of the projected value.

    1. The last `window` queries vote, as in SnapKV. After another method, as in "keydiff +
       criticalkv", that method scores instead; with "+ adakv" heads get their sizes by that score.
    2. Of each head's entries to keep, the part `first` is chosen by score, forced ones included.
    3. The others are those of the highest product of score and norm, mean over the query heads.

    As in the authors' code and in kvpress, `epsilon` is added to the mean of the window's votes; in
    `criticalkv_summed` to their sum over its 32 queries. `norm="l2"` costs less. Scores below 0 are
    counted from the lowest one, so that a large norm never counts against an entry; kvpress
    multiplies them as they are. Do not use it after scores that hold the value's norm already.
    Raises KvfoldError for options out of range.
    Source: Feng et al., algorithm 1; FFY0/DefensiveKV and NVIDIA/kvpress `criticalkv_press.py`.
    """

    by_head: ClassVar[bool] = True
    first: float = 0.5  # part of the kept entries that is chosen by score alone
    epsilon: float = 1e-4  # added to mean scores, so that norms decide where they are 0
    norm: OutputNorm = "l1"  # l1 as published, or l2, which costs less
    window: int = 32  # last queries that vote; their entries always stay
    kernel: int = 7  # neighbours that votes are pooled over, odd
    pooling: Pooling = "max"  # how votes are pooled

    def __post_init__(self) -> None:
        check_window(self.window, self.kernel)
        self.check_range(0, 1, "first")
        self.check_range(0, None, "epsilon")

    def stages(self) -> Stages:
        votes = partial(mean_votes, window=self.window, kernel=self.kernel, pooling=self.pooling)
        needs = Needs(LastQueries(self.window), OutputNorms(self.norm))
        forced = Forced(recent=self.window)
        return Stages(needs=needs, score=votes, forced=forced, select=self._select())

    def brings(self) -> Stages:
        return Stages(needs=Needs(OutputNorms(self.norm)), select=self._select())

    def _select(self) -> Select:
        return partial(in_two_stages, first=self.first, epsilon=self.epsilon)


def in_two_stages(
    observation: Observation,
    scores: Tensor,
    forced: Tensor,
    positions: Tensor,
    counts: Tensor,
    first: float,
    epsilon: float,
) -> Tensor:
    """Slots `[B, H, K]`: the part `first` of `counts [B, H]` by score, then by score times norm.

    scores, forced and positions `[B, H, T]`. Ascending, −1 for holes.
    """
    half = (counts.double() * first + ROUNDING).long()
    sure = forced | highest(with_forced(scores, forced, positions), half)
    norms = observation.output_norms().unflatten(1, (scores.shape[1], -1)).mean(2)
    lowest = scores.masked_fill(positions < 0, 0).clamp(max=0).amin(-1, keepdim=True)
    return top(with_forced((scores - lowest + epsilon) * norms, sure, positions), counts)
