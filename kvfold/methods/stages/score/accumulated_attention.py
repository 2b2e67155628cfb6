# SPDX-License-Identifier: Apache-2.0
"""Attention received, summed over every query since the entry was stored."""

import torch
from torch import Tensor

from kvfold.methods.observation import Observation


def accumulated_attention(seen: Observation, per_visible_query: bool) -> Tensor:
    """Column sums `[B, H, T]`, or with `per_visible_query` means over the queries that saw it."""
    assert seen.column_sums is not None
    if not per_visible_query:
        return seen.column_sums
    newest = seen.positions.amax(-1, keepdim=True)
    visible = torch.where(seen.positions < 0, 1, newest - seen.positions + 1)
    return seen.column_sums / visible
