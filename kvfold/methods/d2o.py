# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvfold.errors import KvfoldError
from kvfold.methods.base import Across, Forced, Method, Needs, Share, Stages, register, when_of
from kvfold.methods.stages.allocate import density
from kvfold.methods.stages.merge.most_similar import Decide, Merging, Similarity, merging
from kvfold.methods.stages.score.accumulated_attention import accumulated_attention
from kvfold.observers.column_sums import ColumnSums


@register(
    "d2o",
    paper="arXiv 2406.13035",
    formula="""
        s[h, t] = Σ_i a[h, i, t],  F[l] = mean_h Var_t s[h, t], scaled to 0 … 1 over layers
        size[l] = softmax(−F)[l]·L·mean size
        u = max_j cos(k[e], k[j]),  merged if u ≥ τ,  τ ← beta·mean_e u + (1 − beta)·τ
        k[j] ← (exp(1)·k[j] + Σ_e exp(u)·k[e]) / (exp(1) + Σ_e exp(u)),  v[j] alike
    """,
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

    1. A layer's size falls with the variance of its column sums.
    2. It keeps sinks, the newest tokens and the largest sums.
    3. An evicted entry e is merged into the kept entry j of highest cosine u if u reaches the
       head's threshold τ, a moving average, and is lost otherwise.

    Merging raised the loss: docs/results/merging.md. Raises KvfoldError for numbers out of range,
    and for spending=official with another allocation than softmax.

    `d2o_official` spends as the released code does: layers 0, 1 and the last stay whole beside the
    budget, and the others' shares are rounded down; stats show the sum. Different from that code,
    the prompt is compressed at its end, not at the first generated token; sums are of KV heads, in
    float32; thresholds begin anew with every sequence; a layer of F = 0 switches nothing off.
    Source: Wan et al., sections 4 and 5.4 to 5.6; AIoT-MLSys-Lab/d2o.
    """

    beta: float = 0.7  # weight of the newest eviction in a threshold
    recent: float = 0.25  # share of a layer's size for the newest tokens
    sinks: int = 4  # first tokens that stay
    allocation: density.Shape = "softmax"  # form of the layers' shares
    norm: density.Norm = "across_layers"  # how the variances are scaled
    merge: Merging = "softmax"  # weights of merged entries; none: evicted entries are lost
    similarity: Similarity = "keys"  # what is compared; independent: both, each for itself
    decide: Decide = "head"  # a threshold for each head, or one
    skip_layers: tuple[int, ...] = ()  # layers that stay whole, inside the budget; −1: the last
    spending: density.Spending = "exact"  # sizes that add up to the budget, or the released ones
    decode: Literal["hold", "append"] = "hold"  # holds its size while decoding, or adds to it

    def __post_init__(self) -> None:
        self.check_range(0, 1, "beta", "recent")
        self.check_range(0, None, "sinks")
        if self.spending == "official" and self.allocation != "softmax":
            raise KvfoldError("d2o:spending=official is of the released allocation=softmax only")

    @property
    def by_head(self) -> bool:  # type: ignore[override]
        """True if each head has a threshold of its own."""
        return self.decide == "head"

    def stages(self) -> Stages:
        return Stages(
            needs=Needs(ColumnSums(), only_attention=True),
            score=partial(accumulated_attention, per_visible_query=False),
            allocate=self._allocate(),
            forced=Forced(sinks=self.sinks, recent=Share(self.recent)),
            when=when_of(self.decode),
            inexact=density.inexact_because(self.spending, self.allocation, self.skip_layers),
            merge=merging(self.merge, self.similarity, self.beta, self.decide),
        )

    def _allocate(self) -> Across:
        share = partial(density.by_density, shape=self.allocation)
        if self.spending == "official":
            share = partial(density.as_released, recent=self.recent)
        share = partial(share, norm=self.norm, skip_layers=self.skip_layers)
        return Across(density.column_variance, share, unrounded=self.spending == "official")
