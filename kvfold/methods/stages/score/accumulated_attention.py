# SPDX-License-Identifier: Apache-2.0
"""Score by accumulated attention: column sums over every query since an entry was stored (H2O)."""

import torch
from torch import Tensor

from kvfold.methods.observation import Observation


def accumulated_attention(observation: Observation, per_visible_query: bool) -> Tensor:
    """Column sums `[B, H, T]`, or with `per_visible_query` means over the queries that saw it."""
    assert observation.column_sums is not None
    if not per_visible_query:
        return observation.column_sums
    newest = observation.positions.amax(-1, keepdim=True)
    visible = torch.where(observation.positions < 0, 1, newest - observation.positions + 1)
    return observation.column_sums / visible
