# SPDX-License-Identifier: Apache-2.0
"""Attention of the newest query."""

from torch import Tensor

from kvfold.observation import Observation


def newest_row(seen: Observation, per_head: bool) -> Tensor:
    """The last query's attention `[B, H, T]`: mean over all query heads, or over each group."""
    row = seen.window_attention(1)[:, :, 0]
    if per_head:
        return seen.group_mean(row)
    return row.mean(1, keepdim=True).expand(-1, seen.keys.shape[1], -1)
