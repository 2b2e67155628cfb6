# SPDX-License-Identifier: Apache-2.0
"""Scores that look at nothing but the position."""

import torch
from torch import Tensor

from kvfold.observation import Observation


def recency(seen: Observation) -> Tensor:
    """The newer, the higher."""
    return seen.positions.float()


def uniform_noise(seen: Observation) -> Tensor:
    """Uniform random scores, fixed by the seed and each token's place after the padding."""
    batch, heads, _ = seen.positions.shape
    padding = torch.where(seen.positions < 0, torch.inf, seen.positions).amin(-1, keepdim=True)
    place = (seen.positions - padding.long()).clamp(min=0)
    generator = torch.Generator().manual_seed(seen.seed)
    noise = torch.rand(heads, int(place.max()) + 1, generator=generator).to(place.device)
    return noise.expand(batch, -1, -1).gather(2, place)
