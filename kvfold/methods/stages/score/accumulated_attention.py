# SPDX-License-Identifier: Apache-2.0
"""Score by accumulated attention: column sums over every query since an entry was stored (H2O)."""

import torch
from torch import Tensor

from kvfold.methods.observation import Observation
from kvfold.observers.column_sums import ColumnSums


def accumulated_attention(observation: Observation, per_visible_query: bool) -> Tensor:
    """Column sums `[B, H, T]`, or with `per_visible_query` means over the queries that saw it."""
    if not per_visible_query:
        return observation[ColumnSums]
    newest = observation.positions.amax(-1, keepdim=True)
    visible = torch.where(observation.positions < 0, 1, newest - observation.positions + 1)
    return observation[ColumnSums] / visible
