# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from kvfold.methods.base import Forced, LastQueries, Measured, Method, Needs, Stages, register
from kvfold.methods.stages.allocate.norm_cut import KEEP_LAYERS, VOTERS, Ranking, norm_cut
from kvfold.methods.stages.score.observation_window import window_votes
from kvfold.methods.stages.score.position import recency


@register(
    "dbudgetkv",
    paper="arXiv 2502.16886",
    presets={"literal": {"include_sinks": True}},
    formula="""
        N(e) = mean_q ‖A[q, n − 1, sinks + e … n − 1]‖,  without the e oldest and the sinks
        size[l] = n − max{e : N(0) − N(e) ≤ threshold·N(0)}
    """,
)
@dataclass(frozen=True)
class DBudgetKV(Method):
    """No budget: the oldest tokens go until the newest query's attention changes too much.

    1. Tokens are ranked by position: the first `sinks` always stay, older ones rank lower.
    2. The lowest are evicted while the norm of the last query's attention, averaged over heads,
       loses at most the share `threshold`; all heads of a layer keep the same number.
    3. `keep_layers` keep everything.

    Sinks count in neither norm, as in the released code: one strong sink would let nearly all
    tokens be evicted. With `include_sinks` (preset `dbudgetkv_literal`) they count, as the paper
    writes. `rows` is its k, the number of last queries to average. `ranking="attention"` is its
    ablation, close to the released default: tokens with the fewest votes of the last 8 queries go
    first, those 8 stay, sinks may go.

    Different from the released code: a query sees only the tokens before it, there also later ones;
    each KV head ranks by the mean of its query heads, there every query head by itself, so that
    with several query heads per KV head, other and more tokens stay here. The defaults are the
    paper's; the code has a threshold of 0.05 and keeps no layer whole. Raises KvfoldError for
    numbers out of range.
    Source: Ni et al., section 3.2; Patrick-Ni/ReFreeKV `modified_models/dynamic_metrics.py`.
    """

    takes_budget: ClassVar[bool] = False
    by_head: ClassVar[bool] = True
    threshold: float = 0.01  # share of the norm that may be lost
    sinks: int = 4  # first tokens that stay
    keep_layers: tuple[int, ...] = KEEP_LAYERS  # layers that keep everything, −1: the last
    rows: int = 1  # last queries that are averaged
    include_sinks: bool = False  # sinks count in the norm
    ranking: Ranking = "position"  # order in which tokens go

    def __post_init__(self) -> None:
        self.check_range(0, None, "threshold", "sinks")
        self.check_range(1, None, "rows")

    def stages(self) -> Stages:
        by_attention = self.ranking == "attention"
        votes = partial(window_votes, window=VOTERS, kernel=1, pooling="max")
        return Stages(
            needs=Needs(LastQueries(max(self.rows, VOTERS) if by_attention else self.rows)),
            score=votes if by_attention else recency,
            allocate=Measured(
                partial(
                    norm_cut,
                    threshold=self.threshold,
                    sinks=self.sinks,
                    rows=self.rows,
                    include_sinks=self.include_sinks,
                    keep_layers=self.keep_layers,
                    ranking=self.ranking,
                )
            ),
            forced=Forced(recent=VOTERS) if by_attention else Forced(sinks=self.sinks),
        )
