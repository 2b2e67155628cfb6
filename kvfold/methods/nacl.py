# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvfold.methods.base import Forced, LastQueries, Method, Needs, Observation, Stages, register
from kvfold.methods.stages.allocate.rounding import ROUNDING
from kvfold.methods.stages.score.observation_window import check_window, window_votes
from kvfold.methods.stages.score.position import uniform_noise
from kvfold.methods.stages.select.top import highest, top, with_forced


@register(
    "nacl",
    paper="arXiv 2408.03675",
    formula="""
        s[h, t] = Σ_{i in the last proxies queries} a[h, i, t]
        kept = the best, and ⌊random·b⌋ more, drawn by softmax_t s[h, t] / temperature
    """,
)
@dataclass(frozen=True)
class NACL(Method):
    """Keeps the entries that the last queries attend to, and draws some of the others at random.

    1. The attention of the last `proxies` queries to each earlier token is summed, as in SnapKV
       without pooling; their entries always stay.
    2. The part `random` of the kept entries is drawn without replacement from those that are not
       among the best, in each KV head by itself. A `temperature` of 0 draws evenly.

    The seed of the cache fixes the draws. `random=0` is `snapkv:kernel=1`. The numbers of proxies
    and of draws are kvfold's own choice. Raises KvfoldError for options out of range.
    Source: Chen et al., section 3; Zefan-Cai/KVCache-Factory.
    """

    proxies: int = 32  # last queries that vote; their entries always stay
    random: float = 0.1  # part of the kept entries that is drawn
    temperature: float = 1.0  # of the draw: 0 for even chances

    def __post_init__(self) -> None:
        check_window(self.proxies, 1)
        self.check_range(0, 1, "random")
        self.check_range(0, None, "temperature")

    def stages(self) -> Stages:
        drawn = partial(best_and_drawn, part=self.random, temperature=self.temperature)
        return Stages(
            needs=Needs(LastQueries(self.proxies)),
            score=partial(window_votes, window=self.proxies, kernel=1, pooling="max"),
            forced=Forced(recent=self.proxies),
            select=drawn if self.random else None,
        )


def best_and_drawn(
    observation: Observation,
    scores: Tensor,
    forced: Tensor,
    positions: Tensor,
    counts: Tensor,
    part: float,
    temperature: float,
) -> Tensor:
    """Slots `[B, H, K]` of the best scores, the `part` of `counts [B, H]` drawn by softmax.

    scores, forced and positions `[B, H, T]`. Ascending, −1 for holes. The highest sums of logits
    and Gumbel noise are a draw without replacement (Vieira, 2014).
    """
    drawn = torch.minimum((counts.double() * part + ROUNDING).long(), counts - forced.sum(-1))
    best = forced | highest(with_forced(scores, forced, positions), counts - drawn)
    noise = uniform_noise(replace(observation, positions=positions))
    gumbel = -(-noise.clamp(min=torch.finfo(noise.dtype).tiny).log()).log()
    chances = scores / temperature + gumbel if temperature else noise
    return top(with_forced(chances, best, positions), counts)
