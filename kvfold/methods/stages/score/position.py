# SPDX-License-Identifier: Apache-2.0
"""Scores that look at nothing but the position."""

import torch
from torch import Tensor

from kvfold.methods.observation import Observation


def recency(observation: Observation) -> Tensor:
    """The newer, the higher."""
    return observation.positions.float()


def uniform_noise(observation: Observation) -> Tensor:
    """Uniform random scores, fixed by the seed, the head, and each token's number in its row."""
    heads = observation.positions.shape[1]
    place = observation.positions.clamp(min=0)
    generator = torch.Generator().manual_seed(observation.seed)
    # Token after token, so that a longer row in the batch changes nothing for a shorter one.
    noise = torch.rand(int(place.max()) + 1, heads, generator=generator).T.to(place.device)
    return noise.expand(len(place), -1, -1).gather(2, place)
