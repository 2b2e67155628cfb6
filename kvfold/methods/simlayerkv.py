# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

from kvfold.errors import KvfoldError
from kvfold.methods.base import Across, Forced, Measured, Method, Needs, Stages, register
from kvfold.methods.stages.allocate import lazy
from kvfold.methods.stages.score.position import recency
from kvfold.methods.stages.when import AtEnd, Once
from kvfold.observers.last_queries import LastQueries


@register(
    "simlayerkv",
    paper="arXiv 2410.13846",
    formula="""
        mass[l] = mean_q Σ_{t < sinks or t ≥ n − window} A[q, n − 1, t]
        size[l] = sinks + window if mass[l] > threshold, else n
    """,
    presets={
        "llama2": {"threshold": 0.65},
        "llama3": {"threshold": 0.9},
        "mistral": {"threshold": 0.8},
        "qwen": {"threshold": 0.85, "keep_last_layer": True},
    },
)
@dataclass(frozen=True)
class SimLayerKV(Method):
    """Lazy layers, which attend to little but the first and last tokens, keep only those.

    1. A layer is lazy if more than `threshold` of its attention, averaged over heads, goes to the
       first `sinks` tokens and the last `window`; presets hold the thresholds of models.
    2. Lazy layers keep these tokens only, all others keep everything.

    `when` names the queries that decide. "first_decode", the paper's main setting: the first
    generated token's, after which the layer is trimmed. "last_query": the prompt's last one, so
    that decoding starts trimmed. "prefill": the last `n_last`, each for the `recent` tokens before
    it, as in the released code. A sequence no longer than sinks and window stays whole; the
    released code keeps some of its tokens twice. In a composition it sizes the layers, and the
    other method chooses the entries of a lazy one, as in "simlayerkv + snapkv". Other strategies
    are the paper's baselines: equally many layers at random, or equally many entries in a pyramid.
    Raises KvfoldError for options out of range, and for strategies that do not go with `when`.
    Source: Zhang et al., sections 5 and 6.4; sail-sg/SimLayerKV `LongBench/SimLayerKV_llama.py`.
    """

    takes_budget: ClassVar[bool] = False
    threshold: float = 0.9  # mass above which a layer is lazy
    window: int = 1024  # last tokens that a lazy layer keeps
    sinks: int = 4  # first tokens that it keeps
    when: Literal["last_query", "first_decode", "prefill"] = "last_query"  # queries that decide
    n_last: int = 32  # queries of when=prefill
    recent: int = 512  # tokens before each of these queries
    keep_last_layer: bool = False  # the last layer is never lazy
    strategy: lazy.Strategy = "lazy"  # lazy layers, or a baseline of the paper

    def __post_init__(self) -> None:
        self.check_range(1, None, "window", "n_last", "recent")
        self.check_range(0, None, "sinks")
        if self.strategy != "lazy" and (self.when == "first_decode" or self.keep_last_layer):
            raise KvfoldError(
                f"simlayerkv:strategy={self.strategy} sizes any layer at the prompt's end: choose "
                "when=last_query or when=prefill, and keep_last_layer=false"
            )

    @property
    def by_head(self) -> bool:  # type: ignore[override]
        """True for "lazy": heads are averaged only in the size of their own layer."""
        return self.strategy == "lazy"

    def stages(self) -> Stages:
        return replace(self.brings_sizes(), score=recency, forced=Forced(sinks=self.sinks))

    def brings_sizes(self) -> Stages:
        return Stages(
            needs=Needs(LastQueries(self.n_last if self.when == "prefill" else 1)),
            allocate=self._allocate(),
            when=Once() if self.when == "first_decode" else AtEnd(),
        )

    def _allocate(self) -> Measured | Across:
        kept = self.sinks + self.window
        mass = partial(lazy.mass_of_last_query, sinks=self.sinks, window=self.window)
        if self.when == "prefill":
            mass = partial(lazy.mass_of_last_queries, sinks=self.sinks)
            mass = partial(mass, last=self.n_last, recent=self.recent)
        rule = partial(lazy.is_lazy, mass=mass, threshold=self.threshold, kept=kept)
        if self.strategy == "lazy":
            rule = partial(rule, keep_last_layer=self.keep_last_layer)
            return Measured(partial(lazy.lazy_size, lazy=rule, kept=kept))
        share = partial(lazy.STRATEGIES[self.strategy], kept=kept)
        return Across(partial(lazy.laziness, lazy=rule), share)
