# SPDX-License-Identifier: Apache-2.0
"""What a compensation gets to see of one layer's eviction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Eviction:
    """Entries before the eviction, and which of them stay.

    keys `[B, H, T, D]`, values `[B, H, T, Dv]`; positions `[B, H, T]`, −1 for padding; slots
    `[B, H, K]` of the entries that stay, ascending, −1 for a hole; column sums `[B, H, T]` where
    the method observes them; `state [B, H]` float32, what this compensation returned the last
    time, None at first; seed of this draw.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    slots: Tensor
    column_sums: Tensor | None = None
    state: Tensor | None = None
    seed: int = 0


# Eviction → kept keys [B, H, K, D], kept values [B, H, K, Dv], state [B, H] or None
Compensate = Callable[[Eviction], tuple[Tensor, Tensor, Tensor | None]]
