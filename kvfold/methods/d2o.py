# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvfold.errors import KvfoldError
from kvfold.methods.base import Across, Method, Stages, register
from kvfold.methods.observation import Needs
from kvfold.methods.stages.allocate import density
from kvfold.methods.stages.merge.most_similar import Decide, Merging, Similarity, merging
from kvfold.methods.stages.score.accumulated_attention import accumulated_attention
from kvfold.methods.stages.select.forced import Forced, Share


@register(
    "d2o",
    paper="arXiv 2406.13035",
    presets={
        "official": {
            "beta": 0.5,
            "recent": 0.5,
            "skip_layers": (0, 1, -1),
            "norm": "official",
            "merge": "official",
            "decide": "head_mean",
            "spending": "official",
        }
    },
)
@dataclass(frozen=True)
class D2O(Method):
    """More entries for layers of dense attention; evicted entries merge into the most similar kept.

    1. A layer's size falls with the variance of its column sums (`allocation`, `norm`).
    2. It keeps `sinks`, the newest tokens (`recent`, a share of its size) and the largest sums.
    3. An evicted entry is merged into the kept entry of highest cosine (`similarity`: of keys or of
       values) if that cosine reaches the head's threshold, a moving average with weight `beta`;
       otherwise it is lost. "independent" merges keys by keys and values by values, with a
       threshold each (Table 9).

    `skip_layers` (negative ones count from the end) stay whole inside the budget. `decode="append"`
    compresses the prompt only. Raises KvfoldError for `beta` and `recent` outside [0, 1], negative
    sinks, and spending=official with another allocation than softmax.

    `d2o_official` holds the released code's values, and spends as it does: layers 0, 1 and the last
    stay whole and do not count in the budget, the others keep their share of it, rounded down;
    stats show the sum. Unlike the released code it compresses the prompt at its end, not when the
    first token is generated; sums the columns of KV heads, as means over their query heads, in
    float32; begins thresholds anew with every sequence; a layer of F = 0 switches nothing off.

    Merging raised the loss: docs/results/merging.md.
    Source: Wan et al., sections 4 and 5.4 to 5.6; AIoT-MLSys-Lab/d2o.
    """

    beta: float = 0.7
    recent: float = 0.25
    sinks: int = 4
    allocation: density.Shape = "softmax"
    norm: density.Norm = "across_layers"
    merge: Merging = "softmax"
    similarity: Similarity = "keys"
    decide: Decide = "head"
    skip_layers: tuple[int, ...] = ()
    spending: density.Spending = "exact"
    decode: Literal["hold", "append"] = "hold"

    def __post_init__(self) -> None:
        if not (0 <= self.beta <= 1 and 0 <= self.recent <= 1 and self.sinks >= 0):
            raise KvfoldError("d2o:beta and d2o:recent are in [0, 1], d2o:sinks is 0 or more")
        if self.spending == "official" and self.allocation != "softmax":
            raise KvfoldError("d2o:spending=official is of the released allocation=softmax only")

    @property
    def by_head(self) -> bool:  # type: ignore[override]
        """True if each head has a threshold of its own."""
        return self.decide == "head"

    def stages(self) -> Stages:
        by = None if self.merge == "none" or self.similarity == "independent" else self.similarity
        return Stages(
            needs=Needs(column_sums=True, only_attention=True, norms=by),
            score=partial(accumulated_attention, per_visible_query=False),
            allocate=self._allocate(),
            forced=Forced(sinks=self.sinks, recent=Share(self.recent)),
            decode=self.decode,
            inexact=density.inexact_because(self.spending, self.allocation, self.skip_layers),
            **merging(self.merge, self.similarity, self.beta, self.decide),
        )

    def _allocate(self) -> Across:
        share = partial(density.by_density, shape=self.allocation)
        if self.spending == "official":
            share = partial(density.as_released, recent=self.recent)
        share = partial(share, norm=self.norm, skip_layers=self.skip_layers)
        return Across(density.column_variance, share, unrounded=self.spending == "official")
