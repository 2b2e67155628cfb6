# SPDX-License-Identifier: Apache-2.0
"""Scores by position alone."""

import torch
from torch import Tensor

from kvfold.methods.observation import Observation


def recency(observation: Observation) -> Tensor:
    """Scores `[B, H, T]`, float32: the position, so that newer entries score higher."""
    return observation.positions.float()


def uniform_noise(observation: Observation) -> Tensor:
    """Uniform random scores `[B, H, T]`, fixed by the seed, the head and the position."""
    heads = observation.positions.shape[1]
    positions = observation.positions.clamp(min=0)
    generator = torch.Generator().manual_seed(observation.seed)
    # Drawn token by token, so that a longer row in the batch changes nothing for a shorter one.
    noise = torch.rand(
        int(positions.max()) + 1, heads, generator=generator, dtype=torch.float32
    ).T.to(positions.device)
    return noise.expand(len(positions), -1, -1).gather(2, positions)
