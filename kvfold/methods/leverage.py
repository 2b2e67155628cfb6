# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from kvfold.errors import KvfoldError
from kvfold.methods.base import Method, Needs, Stages, register
from kvfold.methods.stages.score.leverage import leverage_scores
from kvfold.observers.stored import KeysBeforeRope


@register(
    "leverage",
    paper="arXiv 2507.08143",
    formula="""
        s[h, t] = x[h, t]·(X[h]ᵀ·X[h] + jitter·I)⁻¹·x[h, t]ᵀ
        X[h] = (K[h] − mean_t k[h, t])·Φ,  K before RoPE,  Φ Gaussian, D × sketch
    """,
)
@dataclass(frozen=True)
class Leverage(Method):
    """Keeps the keys that the other keys of their head span least.

    Keys are compared before RoPE. They are projected to `sketch` channels at random, by the seed of
    the cache; keys of no more channels are taken as they are. It uses no queries, sinks or window.
    Different from kvpress: heads and rows of a layer share a projection, so that a row in a batch
    scores as alone, and padding takes no part. Raises KvfoldError for options out of range.
    Source: Chari and Van Durme, section 3; NVIDIA/kvpress `leverage_press.py`.
    """

    by_head: ClassVar[bool] = True
    sketch: int = 48  # channels of the random projection
    jitter: float = 1e-2  # added to the diagonal, times ten as long as it does not suffice

    def __post_init__(self) -> None:
        self.check_range(1, None, "sketch")
        if not self.jitter > 0:
            raise KvfoldError(f"leverage:jitter is above 0, not {self.jitter}")

    def stages(self) -> Stages:
        score = partial(leverage_scores, sketch=self.sketch, jitter=self.jitter)
        return Stages(needs=Needs(KeysBeforeRope()), score=score)
