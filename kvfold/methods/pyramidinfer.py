# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from kvfold.errors import KvfoldError
from kvfold.methods.base import Method, Stages, register
from kvfold.methods.stages.select.token_pruning import survivors


@register(
    "pyramidinfer",
    paper="arXiv 2405.12532",
    formula="""
        s[t] = mean_q Σ_{i in newest} w[i]·A[q, i, t],  w from 1 to newest_weight
        share[l] = least + (1 − least)·(1 + cos(π·l / L)) / 2
    """,
)
@dataclass(frozen=True)
class PyramidInfer(Method):
    """Deeper layers compute fewer tokens of the prompt, so that work and cache shrink together.

    1. The newest tokens (`recent`, a share of the prompt) always go on to the next layer.
    2. So does a share of the tokens before them: those that the newest attend to most, one set for
       all heads. The share falls with depth along a cosine, from 1 to `least`.
    3. A layer stores the keys and values of the tokens that reached it.

    The prompt's forward itself changes, so kvfold.generate and kvfold.compress run it layer by
    layer. Entries of later prefills and of generated tokens are all kept; the authors' code also
    thins out generated ones in blocks. Raises KvfoldError for options out of range.
    Source: Yang et al., section 3; mutonix/pyramidinfer `modeling_llama.py`, `configs`.
    """

    takes_budget: ClassVar[bool] = False
    least: float = 0.9  # share that the last layers pass on
    recent: float = 0.2  # share of the prompt that always goes on
    sinks: int = 4  # first tokens that go on
    newest_weight: float = 1.2  # weight of the newest query; the oldest has 1
    least_context: int = 64  # tokens before the newest that are not pruned further
    interval: int = 1  # layers from one pruning to the next

    def __post_init__(self) -> None:
        if not 0 < self.least <= 1 or not 0 <= self.recent < 1:
            raise KvfoldError("pyramidinfer:least is in (0, 1] and pyramidinfer:recent in [0, 1)")
        self.check_range(1, None, "interval")
        self.check_range(0, None, "sinks", "newest_weight")

    def stages(self) -> Stages:
        return Stages(
            token_pruning=partial(
                survivors,
                least=self.least,
                recent=self.recent,
                sinks=self.sinks,
                newest_weight=self.newest_weight,
                least_context=self.least_context,
                interval=self.interval,
            )
        )
