# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial

from kvfold.methods.base import Forced, Hold, Method, Needs, Stages, register, uniform
from kvfold.methods.stages.merge.base import MergeStages
from kvfold.methods.stages.merge.value_spread import spread_values
from kvfold.methods.stages.score.position import recency
from kvfold.observers.column_sums import ColumnSums


@register(
    "cam",
    paper="",
    formula="""
        v[t] ← v[t] + M·v[e] / m,  M ~ Bernoulli(p),  t: the m ≤ targets kept entries after e
        p = min(1, c[e] / mean_t c[t]),  c[t] = Σ_i a[h, i, t]
    """,
)
@dataclass(frozen=True)
class CaM(Method):
    """Keeps first and recent tokens; an evicted token's value is added to the kept ones after it.

    The next `targets` kept tokens receive it with a probability: the token's attention relative to
    theirs, at most 1. `deterministic` adds the expectation instead. Of the tokens evicted together,
    only the values of the `newest` are added: 1, as in the released code; 0: all. When a prompt
    ends, many evicted tokens have the same targets, and all of their values would drown these. In a
    composition it adds the merging only. Raises KvfoldError for options below their least value.

    Spreading at a prompt's end changes next to nothing: the loss of the text that follows changes
    by −0.000 at kept 0.1, 95 % interval −0.002 to +0.002, against streaming_llm_original
    (SmolLM2-135M-Instruct, n=60, docs/results/merging.md).
    Source: Zhang et al., CaM, ICML 2024; zyxxmu/cam `kv_cache_cam.py`.
    """

    targets: int = 32  # kept entries that receive an evicted one's value, at most
    deterministic: bool = False  # adds the expectation instead of drawing
    newest: int = 1  # evicted entries that are spread at once; 0: all
    sinks: int = 4  # first tokens that stay

    def __post_init__(self) -> None:
        self.check_range(1, None, "targets")
        self.check_range(0, None, "newest", "sinks")

    @property
    def by_head(self) -> bool:  # type: ignore[override]
        """True if deterministic: random draws depend on the head's index."""
        return self.deterministic

    def stages(self) -> Stages:
        spread = self.brings()
        return Stages(
            needs=spread.needs,
            score=recency,
            allocate=uniform,
            forced=Forced(sinks=self.sinks),
            merge=spread.merge,
            when=Hold(),
        )

    def brings(self) -> Stages:
        return Stages(
            needs=Needs(ColumnSums()),
            merge=MergeStages(
                partial(
                    spread_values,
                    targets=self.targets,
                    deterministic=self.deterministic,
                    newest=self.newest,
                )
            ),
        )
