# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from kvfold.methods.base import Forced, LastQueries, Method, Needs, Stages, register
from kvfold.methods.stages.allocate.pyramid import pyramid, pyramid_official
from kvfold.methods.stages.score.observation_window import Pooling, check_window, mean_votes

ROUNDED_STEP = "the released schedule rounds its step down, so that upper layers keep more"


@register(
    "pyramidkv",
    paper="arXiv 2406.02069",
    presets={"official": {"rounding": "official"}},
    formula="""
        s[h, t] = pool_{u near t} Σ_{i in window} a[h, i, u]
        size[l] = window + m·(2 − 1/beta) − l / (L − 1)·2m·(1 − 1/beta),  m = mean size − window
    """,
)
@dataclass(frozen=True)
class PyramidKV(Method):
    """SnapKV's votes, with sizes that fall from the bottom layer to the top one.

    Votes are max-pooled over `kernel` neighbours, as in the released code; the paper sums attention
    and names no pooling (`kernel=1`). Sizes are an arithmetic sequence: besides the window, the top
    layer keeps `1/beta` of the mean, the bottom one twice the mean less that. `rounding="exact"`
    spends exactly the budget; `"official"` reproduces the released integers, which exceed it.
    Raises KvfoldError for a window or `beta` below 1.
    Source: Cai et al., section 4.2; Zefan-Cai/KVCache-Factory `pyramidkv_utils.py`.
    """

    by_head: ClassVar[bool] = True
    window: int = 8  # last queries that vote; their entries always stay
    kernel: int = 7  # neighbours that votes are pooled over, odd
    pooling: Pooling = "max"  # how votes are pooled
    beta: int = 20  # mean size over the top layer's, both without the window
    rounding: Literal["exact", "official"] = "exact"  # exact sum, or as released

    def __post_init__(self) -> None:
        check_window(self.window, self.kernel)
        self.check_range(1, None, "beta")

    @property
    def nested(self) -> bool:  # type: ignore[override]
        """True for exact sizes; the released ones may grow in a layer as the budget falls."""
        return self.rounding == "exact"

    def stages(self) -> Stages:
        schedule = pyramid if self.rounding == "exact" else pyramid_official
        return Stages(
            needs=Needs(LastQueries(self.window)),
            score=partial(mean_votes, window=self.window, kernel=self.kernel, pooling=self.pooling),
            allocate=partial(schedule, window=self.window, beta=self.beta),
            forced=Forced(recent=self.window),
            inexact="" if self.rounding == "exact" else ROUNDED_STEP,
        )
