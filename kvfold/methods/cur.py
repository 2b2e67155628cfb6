# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvfold.methods.base import Forced, Method, Observation, Stages, register

Leverage = Literal["kv_product", "kv_avg", "key", "value"]


@register(
    "cur",
    paper="arXiv 2509.15038",
    formula="""
        s[h, t] = share_k[h, t]·share_v[h, t]
        share_k[h, t] = ‖k[h, t]‖² / Σ_{u in block of t} ‖k[h, u]‖²,  share_v alike
    """,
)
@dataclass(frozen=True)
class CUR(Method):
    """Keeps entries whose keys and values have large norms, compared with their neighbours'.

    An entry's leverage is its squared norm divided by the sum over `local` consecutive entries (0:
    all entries), for keys and for values. `leverage` combines both: their product, their mean, or
    one of them. The first `sinks` tokens stay. Where one latent serves all heads (DeepSeek), its
    score is the mean over the heads' own keys and values. Raises KvfoldError for negative numbers.
    Source: CurDKV, section 3; NVIDIA/kvpress `cur_press.py`.
    """

    by_head: ClassVar[bool] = True
    nested: ClassVar[bool] = True
    sinks: int = 4  # first tokens that stay
    leverage: Leverage = "kv_product"  # how the shares of keys and values combine
    local: int = 16  # entries of a block; 0: all entries

    def __post_init__(self) -> None:
        self.check_range(0, None, "sinks", "local")

    def stages(self) -> Stages:
        return Stages(
            score=partial(local_leverage, leverage=self.leverage, local=self.local),
            forced=Forced(sinks=self.sinks),
        )


def local_leverage(observation: Observation, leverage: Leverage, local: int) -> Tensor:
    """Leverage scores `[B, H, T]`, float32, from shares of squared norms; their sum is 1."""
    real = observation.positions >= 0
    of_keys = _shares(observation.keys, real, local)
    of_values = _shares(observation.values, real, local)
    scores = {
        "kv_product": of_keys * of_values,
        "kv_avg": (of_keys + of_values) / 2,
        "key": of_keys,
        "value": of_values,
    }[leverage]
    return scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def _shares(entries: Tensor, real: Tensor, local: int) -> Tensor:
    """Share `[B, H, T]` of each entry `[B, H, T, D]` in its window's squared norms; padding: 0."""
    squares = entries.float().square().sum(-1).masked_fill(~real, 0)
    index = (real.cumsum(-1) - 1).clamp(min=0)  # among the real entries of its head
    window = index // (local or entries.shape[2])
    sums = torch.zeros_like(squares).scatter_add(2, window, squares).gather(2, window)
    return squares / sums.clamp(min=torch.finfo(squares.dtype).tiny)
