# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvfold.errors import KvfoldError
from kvfold.methods.base import AddOn, Needs, Stages, register
from kvfold.methods.stages.refit.matching import BiasPer, Matching, Target
from kvfold.observers.references import ReferencesNeed


@register(
    "match",
    paper="arXiv 2602.16284",
    formula="""
        for reference queries i, all entries j of a KV head, kept ones S, all else in view R:
        w = argmin_{w >= 0} sum_i (c_i (sum_{S} w_j e_ij / sum_j e_ij - 1))^2 + hold·||w - 1||^2
        bias = ln w
        V_S = argmin_C sum_i ||o_i - attention of i over R and S, with bias and values C||^2
              + ridge·||C - V_S||^2
    """,
)
@dataclass(frozen=True)
class Match(AddOn):
    """Refits another method's entries: new values and a bias each, so that attention stays.

    1. The other method chooses the entries: "kvzip + match", "snapkv + match".
    2. Reference queries are those of the text's repetition where the method repeats it (KVzip),
       else the text's own, rotated forward as if the text were read again: no second forward.
    3. Each kept entry gets a bias, added to its logits, so that the kept ones together weigh as
       much as all did: non-negative least squares, held to a bias of 0.
    4. Values are fitted by least squares, with a ridge towards those that the entries had.

    `target="whole"` fits the output of attention to all that a query sees; `"block"` that to the
    text alone, as published, which often does not lower the whole output's error. `bias="head"`
    gives all entries of a head one bias; `"none"`, with `target="block"`, none: such contexts go
    into vLLM. `values="kept"` leaves the values. Errors on held-out reference queries, and guards,
    are in `stats()`. `ridge=0` means 0.01 with a bias per head and 0.001 else; with
    `target="whole"` a smaller one lets values explode. A head that keeps more than the part `up_to`
    of its entries stays as it is: it loses least, and would cost most. So does a text's opening. A
    later turn is fitted by its own queries, if it is compressed. `on_policy` runs the repetition
    again, each layer over refitted ones: two more forwards. Raises KvfoldError for options out of
    range, for `on_policy` with `references="text"`, and for `bias="none"` with values fitted to the
    whole output, which overshoot.
    Different from the released code: true non-negative weights, and the ridge.
    Source: Zweiger et al., section 3; adamzweiger/compaction `compaction/algorithms/`.
    """

    beside: ClassVar[str] = "kvzip"
    by_head: ClassVar[bool] = False  # its report is of all heads together
    target: Target = "whole"  # the output with all else in view, or the text's alone
    bias: BiasPer = "entry"  # a bias for each entry, one for a head, none
    values: Literal["fit", "kept"] = "fit"  # fitted, or as they were
    references: Literal["repeat", "text"] = "repeat"  # of the repetition where there is one
    on_policy: bool = False  # queries as the refitted layers below make them
    queries: int = 2048  # most reference queries of a KV head
    ridge: float = 0.0  # pull towards the values as they were, 0: by the bias
    hold: float = 1e-3  # pull of weights towards 1
    up_to: float = 0.5  # heads that keep a larger part of their entries stay as they are

    def __post_init__(self) -> None:
        self.check_range(64, None, "queries")
        self.check_range(0, None, "ridge", "hold", "up_to")
        if self.on_policy and self.references == "text":
            raise KvfoldError("match:on_policy=true reads a repetition: leave references=text out")
        if self.bias == "none" and self.values == "fit" and self.target == "whole":
            raise KvfoldError(
                "match: without a bias, values fitted to the whole output overshoot, and the cache "
                "gets worse: choose target=block"
            )

    def brings(self) -> Stages:
        ridge = self.ridge or (1e-2 if self.bias == "head" else 1e-3)
        refit = Matching(self.target, self.bias, self.values == "fit", ridge, self.hold, self.up_to)
        repeated = self.references == "repeat"
        need = ReferencesNeed(self.queries, repeated, self.on_policy, self.target == "whole")
        return Stages(needs=Needs(need), refit=refit)
