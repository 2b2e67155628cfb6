# SPDX-License-Identifier: Apache-2.0
"""Norms of values as the output projection W_o puts them into the model's dimension.

W_h are the columns of W_o that query head h feeds. ‖W_h v‖₂ = √(vᵀ·M_h·v) with the Gram matrix
M_h = W_hᵀW_h takes O(T·Dv²) instead of O(T·Dv·Dm); the L1 norm has no such form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TILE = 2**24  # most numbers of an intermediate result


def gram(weight: Tensor) -> Tensor:
    """Gram matrices `[Hq, Dv, Dv]`, float32, of `weight [Hq, Dm, Dv]`."""
    weight = weight.float()
    return weight.transpose(1, 2) @ weight


def l2_norms(values: Tensor, grams: Tensor) -> Tensor:
    """‖W_h v‖₂ `[B, Hq, T]`, float32, of `values [B, H, T, Dv]`; `grams [Hq, Dv, Dv]`."""

    def squared(projected: Tensor, own: Tensor) -> Tensor:
        return (projected * own).sum(-1)

    return _in_tiles(values, grams, squared).clamp(min=0).sqrt()


def l1_norms(values: Tensor, weight: Tensor) -> Tensor:
    """‖W_h v‖₁ `[B, Hq, T]`, float32, of `values [B, H, T, Dv]`; `weight [Hq, Dm, Dv]`."""

    def summed(projected: Tensor, own: Tensor) -> Tensor:
        return projected.abs().sum(-1)

    return _in_tiles(values, weight.float().transpose(1, 2), summed)


def _in_tiles(
    values: Tensor, matrices: Tensor, reduce: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """`reduce(v·M_h, v)` `[B, Hq, T]` of each value; `matrices [Hq, Dv, X]`, tiles of tokens."""
    rows, heads = values.shape[:2]
    grouped = matrices.unflatten(0, (heads, -1))  # [H, G, Dv, X]
    tokens = max(1, TILE // (rows * len(matrices) * matrices.shape[2]))
    tiles = [tile.float()[:, :, None] for tile in values.split(tokens, 2)]
    return torch.cat([reduce(tile @ grouped, tile) for tile in tiles], -1).flatten(1, 2)
