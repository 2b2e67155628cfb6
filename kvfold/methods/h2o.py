# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from kvfold.methods.base import Forced, Method, Needs, Share, Stages, register, uniform, when_of
from kvfold.methods.stages.score.accumulated_attention import accumulated_attention
from kvfold.observers.column_sums import ColumnSums


@register(
    "h2o",
    paper="arXiv 2306.14048",
    formula="""
        s[h, t] = Σ_i a[h, i, t] over all queries i so far
        kept = the newest ⌊recent·b⌋, and the best of the others
    """,
)
@dataclass(frozen=True)
class H2O(Method):
    """Keeps recent tokens and heavy hitters: those that received most attention so far.

    Column sums grow while decoding, and every new token evicts one. `recent` is the share of the
    size for the newest tokens, the paper's half by default. `decode="append"` compresses the
    prompt only; `normalize="visible_queries"` divides by the number of queries that could see a
    token. Raises KvfoldError for a `recent` outside [0, 1].
    Source: Zhang et al., section 4.2; FMInference/H2O `h2o_hf/utils_real_drop`.
    """

    by_head: ClassVar[bool] = True
    recent: float = 0.5  # share of the size for the newest tokens
    decode: Literal["hold", "append"] = "hold"  # holds its size while decoding, or adds to it
    normalize: Literal["none", "visible_queries"] = "none"  # sums, or means over queries

    def __post_init__(self) -> None:
        self.check_range(0, 1, "recent")

    def stages(self) -> Stages:
        per_query = self.normalize == "visible_queries"
        return Stages(
            needs=Needs(ColumnSums(), only_attention=not per_query),
            score=partial(accumulated_attention, per_visible_query=per_query),
            allocate=uniform,
            forced=Forced(recent=Share(self.recent)),
            when=when_of(self.decode),
        )
