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

    `rotate` turns vectors `[B, H, n, D]` by `[B]` or `[B, n]` positions: each rotary pair by an
    angle of its own, so that a vector of ones per position shows all cosines and sines.
    """
    rows, one = len(first), torch.eye(size, device=first.device)
    # Components that mix: of a pair both, without rotary embeddings each alone.
    pairs = (rotate(one[None, None], torch.ones_like(first[:1]))[0, 0] != 0).float().maximum(one)
    positions = first[:, None] + torch.arange(count, device=first.device)
    ones = one.new_ones(()).expand(rows, 1, count, size)
    turned = rotate(ones, positions)[:, 0].mean(1)  # [B, D], cos − sin and cos + sin
    cosines = turned @ pairs / pairs.sum(0)
    return torch.diag_embed(cosines) + (pairs - one) * (turned - cosines)[:, None, :]
