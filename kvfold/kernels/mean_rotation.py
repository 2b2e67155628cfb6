# SPDX-License-Identifier: Apache-2.0
"""Rotary pairs, and the mean of the rotations of consecutive positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# (keys [B, H, n, D], shift [B], [B, n] or [B, H, n]) → keys rotated forward by `shift` positions
Rotate = Callable[[Tensor, Tensor], Tensor]


def rotary_pairs(rotate: Rotate, size: int, device: torch.device) -> Tensor:
    """Components that a rotation mixes, 1 in `[D, D]`, 0 elsewhere.

    Of a rotary pair these are both; a component that is not rotated is alone.
    """
    one = torch.eye(size, dtype=torch.float32, device=device)
    by_one = torch.ones(1, dtype=torch.long, device=device)
    return (rotate(one[None, None], by_one)[0, 0] != 0).float().maximum(one)


def pair_norms(vectors: Tensor, pairs: Tensor) -> Tensor:
    """Length of each component's rotary pair, of vectors `[..., D]` and `pairs [D, D]`."""
    return (vectors.square() @ pairs).sqrt()


def mean_rotation(rotate: Rotate, first: Tensor, count: int, size: int) -> Tensor:
    """Mean rotation M `[B, D, D]` of `count` positions from `first [B]` on, float32: x → x @ M.

    `rotate` turns vectors `[B, H, n, D]` by `[B]` or `[B, n]` positions: each rotary pair by an
    angle of its own, so that a vector of ones per position shows all cosines and sines.
    """
    rows, one = len(first), torch.eye(size, dtype=torch.float32, device=first.device)
    pairs = rotary_pairs(rotate, size, first.device)
    positions = first[:, None] + torch.arange(count, device=first.device)
    ones = one.new_ones(()).expand(rows, 1, count, size)
    turned = rotate(ones, positions)[:, 0].mean(1)  # [B, D], cos − sin and cos + sin
    cosines = turned @ pairs / pairs.sum(0)
    return torch.diag_embed(cosines) + (pairs - one) * (turned - cosines)[:, None, :]
