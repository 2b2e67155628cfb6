# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from kvfold.methods.base import Forced, Heads, LastQueries, Method, Needs, Stages, register, uniform
from kvfold.methods.stages.allocate.heads import Rule, adaptive
from kvfold.methods.stages.score.observation_window import Pooling, check_window, mean_votes


@register(
    "adakv",
    paper="arXiv 2407.11550",
    formula="""
        s[h, t] = pool_{u near t} Σ_{i in window} a[h, i, u]
        size[h] = window + f + h's part of the best H·(m − f) entries beyond the f best of each
        f = ⌊floor·m⌋,  m = mean size − window
    """,
)
@dataclass(frozen=True)
class AdaKV(Method):
    """SnapKV's votes, with a layer's budget shared among its heads by their number of top votes.

    1. The last `window` queries vote, as in SnapKV.
    2. The votes of all heads of a layer are ranked together. Besides the window, a head keeps as
       many entries as it has among the best, and at least the share `floor` of the mean.

    `rule="floor"` guarantees that share and spends exactly the budget; `"blend"` is the released
    code, which mixes the result with uniform sizes and rounds. `normalize`, in that code but off by
    default, weighs each head by the share of its votes that its best entries hold. After another
    method, as in "pyramidkv + adakv", it shares that method's sizes among heads by that method's
    scores. Raises KvfoldError for a `floor` outside [0, 1].
    Source: Feng et al., algorithms 1 and 2; FFY0/AdaKV `monkeypatch/snapkv_utils.py`.
    """

    by_head: ClassVar[bool] = True
    window: int = 32  # last queries that vote; their entries always stay
    kernel: int = 7  # neighbours that votes are pooled over, odd
    pooling: Pooling = "max"  # how votes are pooled
    floor: float = 0.2  # share of the mean size that every head gets
    rule: Rule = "floor"  # sizes that spend exactly the budget, or the released mix
    normalize: bool = False  # heads weighed by the votes that their best entries hold

    def __post_init__(self) -> None:
        check_window(self.window, self.kernel)
        self.check_range(0, 1, "floor")

    def stages(self) -> Stages:
        return Stages(
            needs=Needs(LastQueries(self.window)),
            score=partial(mean_votes, window=self.window, kernel=self.kernel, pooling=self.pooling),
            allocate=uniform,
            heads=self._heads(),
            forced=Forced(recent=self.window),
            inexact=self._inexact(),
        )

    def brings(self) -> Stages:
        return Stages(heads=self._heads(), inexact=self._inexact())

    def _inexact(self) -> str:
        return "each head's blended share is rounded by itself" if self.rule == "blend" else ""

    def _heads(self) -> Heads:
        return partial(adaptive, floor=self.floor, rule=self.rule, normalize=self.normalize)
