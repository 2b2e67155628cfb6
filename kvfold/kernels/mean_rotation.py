# SPDX-License-Identifier: Apache-2.0
"""Mean of the rotations of consecutive positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def mean_rotation(
    rotate: Callable[[Tensor, Tensor], Tensor], first: Tensor, count: int, size: int
) -> Tensor:
    """Mean rotation M `[B, D, D]` of `count` positions from `first [B]` on, float32: x → x @ M.

    `rotate` turns vectors `[B, H, n, D]` by as many positions as `[B]` says.
    """
    none = torch.eye(size, device=first.device).expand(len(first), 1, size, size)
    total, summed = none, 1
    for bit in f"{count:b}"[1:]:
        # The next `summed` positions are those before, rotated by as many.
        total, summed = total + rotate(total, torch.full_like(first, summed)), 2 * summed
        if bit == "1":
            total, summed = none + rotate(total, torch.ones_like(first)), summed + 1
    return rotate(total, first)[:, 0] / count
