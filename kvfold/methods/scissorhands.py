# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from kvfold.errors import KvfoldError
from kvfold.methods.base import Forced, LastQueries, Method, Needs, Stages, register, when_of
from kvfold.methods.stages.score.observation_window import check_window
from kvfold.methods.stages.score.recent_rows import lasting_attention, seldom_below_average
from kvfold.observers.stored import PreviousScores


@register(
    "scissorhands",
    paper="arXiv 2305.17118",
    formula="""
        s[h, t] = −|{i in window: t <= i, a[h, i, t] < 1/n[i]}|,  n[i]: entries that query i sees
        rule=sums: s[h, t] = Σ_{i in window} a[h, i, t] + decay·s[h, t] of the last eviction
    """,
    presets={"kvcf": {"rule": "sums", "recent": 0}},
)
@dataclass(frozen=True)
class Scissorhands(Method):
    """Evicts the entries that recent queries most often gave less than the average attention.

    1. For each of the last `window` queries, an entry is counted if its attention is below the mean
       of all entries that the query sees; the mean of a KV head's query heads.
    2. The newest `recent` entries and those of lowest counts stay; of equal ones the older. At the
       prompt's end, and after each 128 generated tokens (another number:
       "scissorhands + every:interval=64").

    `rule="sums"` adds up the queries' attention, beside `decay` of what the last eviction gave;
    `scissorhands_kvcf` does so as KVCache-Factory, without its random draws.

    Different from the paper: the size is the budget after each eviction, and attention is that to
    the entries stored then. Raises KvfoldError for options out of range.
    Source: Liu et al., section 4, algorithm 2; Zefan-Cai/KVCache-Factory `scissorhands.py`.
    """

    by_head: ClassVar[bool] = True
    window: int = 400  # last queries that count
    recent: int = 10  # newest entries that always stay
    rule: Literal["counts", "sums"] = "counts"  # of what is below the average, or of attention
    decay: float = 1.0  # of older scores, with rule=sums
    decode: Literal["every", "append"] = "every"  # evicts generated tokens in rounds, or adds them

    def __post_init__(self) -> None:
        check_window(self.window, 1)
        self.check_range(0, None, "recent", "decay")
        if self.decay != 1 and self.rule == "counts":
            raise KvfoldError("scissorhands:decay goes with rule=sums")

    def stages(self) -> Stages:
        sums = self.rule == "sums"
        scores = partial(lasting_attention, decay=self.decay) if sums else seldom_below_average
        return Stages(
            needs=Needs(LastQueries(self.window), PreviousScores() if sums else None),
            score=partial(scores, window=self.window),
            forced=Forced(recent=self.recent),
            when=when_of(self.decode),
        )
