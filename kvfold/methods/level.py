# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar

from kvfold.methods.base import AddOn, Stages, register
from kvfold.methods.stages.select.one_set import Rule


@register(
    "level",
    paper="",
    formula="""
        mass[t] = Σ_{l, h} (s[l, h, t] − min_t s[l, h]) / Σ_t (s[l, h, t] − min_t s[l, h])
        kept = the tokens of highest mass, as many as a head keeps on average
    """,
)
@dataclass(frozen=True)
class Level(AddOn):
    """All layers and heads keep one set of tokens, made of another method's: "kvzip + level".

    For engines whose pages hold whole tokens. When a prefill ends, the other method chooses what
    each head keeps; `rule` makes one set of it. "mass": the highest sum of the heads' shares of
    scores; "votes": the tokens that most heads keep; both as many as a head keeps on average.
    "union": every token that any head keeps, which is more than the budget. Forced tokens stay.

    Every layer holds all entries until the last one has attended. Refused for methods that evict
    while decoding.
    """

    beside: ClassVar[str] = "kvzip"
    rule: Rule = "mass"  # by scores, by the votes of heads, or all that any head keeps

    def brings(self) -> Stages:
        inexact = "all tokens that any head keeps" if self.rule == "union" else ""
        return Stages(shape=self.rule, inexact=inexact)
