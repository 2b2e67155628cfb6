# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvfold.errors import IllegalComposition
from kvfold.methods.base import Method, Stages, register
from kvfold.methods.observation import Needs
from kvfold.methods.stages.merge.most_similar import merge_one, merge_similar
from kvfold.methods.stages.merge.value_spread import spread_values


@register("merge", paper="")
@dataclass(frozen=True)
class Merge(Method):
    """Saves something of the tokens that another method evicts: "h2o + merge:rule=d2o".

    "d2o" merges each into the kept token it resembles most, "cam" spreads the values of all of
    them over the kept tokens that follow. Both with their papers' values.

    Neither helped here. SmolLM2-135M-Instruct, 60 passages of novels, 700 tokens compressed, loss
    of the next 120: "h2o + merge" is 0.071 above h2o at kept 0.1 and 0.032 at 0.2, "knorm + merge"
    0.027 and 0.018 above knorm, 95 % intervals above 0; "cam" breaks the model (+5.5), as the
    values of all that leave a prompt at once drown those they are added to
    (docs/results/merging.md).
    """

    takes_budget: ClassVar[bool] = False
    rule: Literal["d2o", "cam"] = "d2o"

    @property
    def by_head(self) -> bool:  # type: ignore[override]
        """Whether nothing is drawn, as CaM does, by the head's number."""
        return self.rule == "d2o"

    def stages(self) -> Stages:
        raise IllegalComposition(
            f"{self} evicts nothing itself: compose it with a method that does, for example "
            f'"h2o + {self}"'
        )

    def brings(self) -> Stages:
        if self.rule == "d2o":
            needs = Needs(norms="keys")
            return Stages(needs=needs, merge=merge_similar, merge_one=merge_one)
        return Stages(needs=Needs(column_sums=True), merge=spread_values)
