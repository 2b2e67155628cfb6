# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from kvfold.methods.base import Method, Observation, Stages, register


@register(
    "keydiff",
    paper="arXiv 2504.15364",
    formula="s[h, t] = −cos(k[h, t], m[h]),  m[h] = mean_t k[h, t] / ‖k[h, t]‖",
)
@dataclass(frozen=True)
class KeyDiff(Method):
    """Keeps the keys that differ most from the average key of their head.

    Keys are compared by direction, after RoPE. It uses no queries, sinks or window. The paper
    evicts block by block during the prefill: `prefill_chunk` with `compress="per_chunk"`. Where one
    latent serves all heads (DeepSeek), its score is the mean over the heads' own keys. A bias of
    the keys' projection counts in their directions, as in kvpress.
    Source: Park et al., section 3; NVIDIA/kvpress `keydiff_press.py`.
    """

    by_head: ClassVar[bool] = True
    nested: ClassVar[bool] = True

    def stages(self) -> Stages:
        return Stages(score=dissimilarity)


def dissimilarity(observation: Observation) -> Tensor:
    """Scores −cos(k, mean direction of the head's keys) `[B, H, T]`, float32; 0 for a zero key."""
    real = (observation.positions >= 0)[..., None]
    directions = F.normalize(observation.keys.float(), dim=-1).masked_fill(~real, 0)
    anchor = directions.sum(2, keepdim=True) / real.sum(2, keepdim=True).clamp(min=1)
    return -(directions * F.normalize(anchor, dim=-1)).sum(-1)
