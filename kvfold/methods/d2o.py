# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from kvfold.allocate.density import Norm, Shape, as_released, by_density, column_variance
from kvfold.compensate.similar import Decide, merge_apart, merge_one, merge_similar
from kvfold.errors import KvfoldError
from kvfold.method import Across, Method, Stages, register
from kvfold.observation import Needs
from kvfold.score.columns import accumulated_attention
from kvfold.select.forced import Forced, Share


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
    """More entries for layers of dense attention; what is evicted joins what it resembles most.

    1. A layer's budget falls with the variance of its column sums (`allocation`, `norm`).
    2. It keeps the first `sinks` tokens, the newest ones (`recent`, a part of its budget), and
       those that received most attention.
    3. An evicted token is merged into the nearest kept one by cosine of keys (`similarity`) where
       that reaches a threshold per head, a moving average by `beta`; otherwise it is lost.
       "independent" merges keys by keys and values by values, each with a threshold (Table 9).

    `skip_layers`, from the end where negative, stay whole inside the budget. `decode="append"`
    compresses the prompt only.

    `d2o_official` holds the released code's values, and spends as it does (`spending`): layers 0, 1
    and the last stay whole beside the budget, and the others keep their part of it, rounded down;
    stats say how much that is. It differs from that code in this: the prompt is compressed at its
    end, not when the first token is generated; attention is of KV heads, the mean of their query
    heads, summed in float32; thresholds begin anew with every sequence; a layer of F = 0 does not
    switch compression off.

    Merging raised the loss beside `merge="none"` by 0.070 at kept 0.1 and 0.037 at 0.2, 95 %
    intervals above 0 (SmolLM2-135M-Instruct, n=60, docs/results/merging.md).
    Source: Wan et al., sections 4 and 5.4 to 5.6; AIoT-MLSys-Lab/d2o.
    """

    beta: float = 0.7
    recent: float = 0.25
    sinks: int = 4
    allocation: Shape = "softmax"
    norm: Norm = "across_layers"
    merge: Literal["softmax", "average", "official", "none"] = "softmax"
    similarity: Literal["keys", "values", "independent"] = "keys"
    decide: Decide = "head"
    skip_layers: tuple[int, ...] = ()
    spending: Literal["exact", "official"] = "exact"
    decode: Literal["hold", "append"] = "hold"

    def __post_init__(self) -> None:
        for name in ("beta", "recent"):
            if not 0 <= getattr(self, name) <= 1:
                raise KvfoldError(f"d2o:{name} is a part, 0 to 1, not {getattr(self, name)}")
        if self.sinks < 0:
            raise KvfoldError(f"d2o:sinks is 0 or more, not {self.sinks}")
        if self.spending == "official" and self.allocation != "softmax":
            raise KvfoldError(
                f"d2o:allocation={self.allocation} is not in the released code: choose "
                "allocation=softmax or spending=exact"
            )

    @property
    def by_head(self) -> bool:  # type: ignore[override]
        """Whether each head has a threshold of its own."""
        return self.decide == "head"

    def stages(self) -> Stages:
        similarity = None if self.merge == "none" else self.similarity
        norms = None if similarity == "independent" else similarity
        return Stages(
            needs=Needs(column_sums=True, only_attention=True, norms=norms),
            score=partial(accumulated_attention, per_visible_query=False),
            allocate=self._allocate(),
            forced=Forced(sinks=self.sinks, recent=Share(self.recent)),
            decode=self.decode,
            inexact=self._inexact(),
            **self._merging(),
        )

    def _merging(self) -> dict[str, Any]:
        """The stages that save something of what is evicted."""
        if self.merge == "none":
            return {}
        options: dict[str, Any] = {"beta": self.beta, "weights": self.merge, "decide": self.decide}
        if self.similarity == "independent":
            return {"compensate": partial(merge_apart, **options)}
        options["on"] = self.similarity
        return {
            "compensate": partial(merge_similar, **options),
            "compensate_one": partial(merge_one, **options),
        }

    def _allocate(self) -> Across:
        skip, norm = self.skip_layers, self.norm
        if self.spending == "official":
            share = partial(as_released, norm=norm, recent=self.recent, skip_layers=skip)
            return Across(column_variance, share, unrounded=True)
        share = partial(by_density, norm=norm, shape=self.allocation, skip_layers=skip)
        return Across(column_variance, share)

    def _inexact(self) -> str:
        if self.allocation == "exponential":
            return "the exponential parts do not add up to the whole budget"
        if self.spending == "exact":
            return ""
        whole = ", ".join(map(str, self.skip_layers))
        return (f"layers {whole} stay whole beside it, " if whole else "") + (
            "the others' parts are rounded down, as released"
        )
