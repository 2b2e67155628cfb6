# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.kernels.gather import take
from kvfold.methods.base import Forced, Method, Observation, Stages, register
from kvfold.methods.stages.select.blocks import best_of_blocks


@register(
    "lagkv",
    paper="arXiv 2504.04704",
    formula="""
        s[h, t] = (σ(k)[h, t] + values·σ(v)[h, t]) / (1 + values)
        σ(x)[h, t] = softmax_{t in block} std_d (x[t, d] − low[d]) / (high[d] − low[d])
        low, high = the extremes of channel d in the next block
    """,
    presets={"official": {"sinks": 16, "lag": 1024}, "kvpress": {"sinks": 4, "lag": 128}},
)
@dataclass(frozen=True)
class LagKV(Method):
    """Keeps, in each block, the entries that vary most when scaled by the next block's range.

    1. After the first `sinks` entries, blocks of `lag` are scaled by the extremes of the block that
       follows. An entry's deviation over channels is its score, after a softmax over the block.
    2. The last complete block and what follows it stay, the newest first.
    3. The other blocks share the rest of the budget evenly; with `cross=true` they compete.

    Fewer than two blocks are kept by recency. Different from the released code, whose options
    `lagkv_official` holds: it keeps int(ratio·lag) of each block, so more than a short prompt's
    budget. Channels that are constant in the next block are left out; in that code and in kvpress
    they make scores NaN. Where one latent serves all heads (DeepSeek), its score is the mean over
    the heads' own keys and values. Raises KvfoldError for values out of range.
    Source: Liang et al., section 3; AI-Lab-China-Merchants-Bank/LagKV `lag_kv.py`.
    """

    by_head: ClassVar[bool] = True
    sinks: int = 4  # first tokens that stay
    lag: int = 128  # entries of a block
    values: float = 1.0  # weight of values beside keys
    cross: bool = False  # blocks compete, instead of sharing the budget evenly

    def __post_init__(self) -> None:
        self.check_range(0, None, "sinks", "values")
        self.check_range(1, None, "lag")

    def stages(self) -> Stages:
        evenly = partial(best_of_blocks, first=self.sinks, block=self.lag)
        return Stages(
            score=partial(lag_scores, sinks=self.sinks, lag=self.lag, values=self.values),
            forced=Forced(sinks=self.sinks),
            select=None if self.cross else evenly,
        )


def lag_scores(observation: Observation, sinks: int, lag: int, values: float) -> Tensor:
    """Scores `[B, H, T]`, float32: below 1 in blocks that another follows, else by recency."""
    real = observation.positions >= 0
    stored = real.sum(-1, keepdim=True)
    scores = 1 + (real.cumsum(-1) / stored.clamp(min=1)).float()
    blocks = ((stored - sinks) // lag).clamp(min=0)
    most = int(blocks.max())
    if most < 2:
        return scores
    slots = (~real).byte().argsort(dim=-1, stable=True)[..., sinks : sinks + most * lag]
    deviations = [
        _deviations(take(entries, slots).unflatten(2, (most, lag)).float())
        for entries in (observation.keys, observation.values)
    ]
    lagging = (deviations[0] + values * deviations[1]) / (1 + values)
    known = torch.arange(most - 1, device=slots.device).repeat_interleave(lag) < blocks - 1
    slots = slots[..., :-lag]
    return scores.scatter(2, slots, lagging.flatten(2).where(known, scores.gather(2, slots)))


def _deviations(blocks: Tensor) -> Tensor:
    """Softmax over tokens of the deviation over channels `[B, H, N − 1, L]`, scaled by the next.

    blocks `[B, H, N, L, D]`. Channels that are constant in the next block are left out.
    """
    low, high = blocks[:, :, 1:].aminmax(dim=3, keepdim=True)
    varying = high > low
    scaled = ((blocks[:, :, :-1] - low) / (high - low).masked_fill(~varying, 1)) * varying
    channels = varying.sum(-1)
    mean = scaled.sum(-1, keepdim=True) / channels.clamp(min=1)[..., None]
    squares = ((scaled - mean) * varying).square().sum(-1) / (channels - 1).clamp(min=1)
    return squares.sqrt().softmax(-1)
