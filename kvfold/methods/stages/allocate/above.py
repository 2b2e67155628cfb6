# SPDX-License-Identifier: Apache-2.0
"""Sizes of heads by a threshold: the number of entries that score at least so much."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.methods.observation import Observation
from kvfold.methods.stages.select.forced import Forced


def above(observation: Observation, *, threshold: float, forced: Forced) -> Tensor:
    """Entries `[B, H]` of each KV head that are forced or score at least `threshold`.

    KVzap (arXiv 2601.07891), with the learned scores of the observation.
    """
    positions = observation.positions
    none = torch.zeros(len(positions), dtype=torch.long, device=positions.device)
    stays = forced.mask(positions, none) | (observation.learned_scores() >= threshold)
    return (stays & (positions >= 0)).sum(-1)
