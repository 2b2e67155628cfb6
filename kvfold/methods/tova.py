# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from kvfold.kernels.single_query import mean_of_heads
from kvfold.methods.base import Forced, Hold, LastQueries, Method, Needs, Stages, register, uniform
from kvfold.methods.observation import Observation


@register("tova", paper="arXiv 2401.06104", formula="s[t] = mean_q A[q, n − 1, t]")
@dataclass(frozen=True)
class TOVA(Method):
    """Evicts the token that the newest query attends to least, the same in all heads of a layer.

    `per_head` evicts in each KV head by its own attention; `keep_last` never evicts the newest
    token.
    Source: Oren et al., section 3.2; schwartz-lab-NLP/TOVA `tova_cache.py`.
    """

    nested: ClassVar[bool] = True
    per_head: bool = False  # each KV head evicts by its own attention
    keep_last: bool = False  # the newest token is never evicted

    @property
    def by_head(self) -> bool:  # type: ignore[override]
        """True if each KV head evicts by its own attention."""
        return self.per_head

    def stages(self) -> Stages:
        return Stages(
            needs=Needs(LastQueries(1), only_attention=True),
            score=partial(newest_row, per_head=self.per_head),
            allocate=uniform,
            forced=Forced(recent=int(self.keep_last)),
            when=Hold(),
        )


def newest_row(observation: Observation, per_head: bool) -> Tensor:
    """Attention `[B, H, T]` of the last query: mean over all query heads, or over each group."""
    heads = observation.keys.shape[1]
    mean = mean_of_heads(observation.window_attention(1), heads if per_head else 1)
    return mean.expand(-1, heads, -1)
