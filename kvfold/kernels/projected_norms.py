# SPDX-License-Identifier: Apache-2.0
"""Norms of values as the output projection W_o puts them into the model's dimension.

W_h are the columns of W_o that query head h feeds. ‖W_h v‖₂ = √(vᵀ·M_h·v) with the Gram matrix
M_h = W_hᵀW_h takes O(T·Dv²) instead of O(T·Dv·Dm); the L1 norm has no such form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Most numbers of an intermediate result: on a CPU it stays in the processor's cache.
TILE, CPU_TILE = 2**24, 2**18


def gram(weight: Tensor) -> Tensor:
    """Gram matrices `[Hq, Dv, Dv]`, float32, of `weight [Hq, Dm, Dv]`."""
    weight = weight.float()
    return weight.transpose(1, 2) @ weight


def l2_norms(values: Tensor, grams: Tensor) -> Tensor:
    """‖W_h v‖₂ `[B, Hq, T]`, float32, of `values [B, H, T, Dv]`; `grams [Hq, Dv, Dv]`."""

    def squared(projected: Tensor, own: Tensor) -> Tensor:
        return projected.mul_(own).sum(-1)

    return _in_tiles(values, grams, squared).clamp(min=0).sqrt()


def l1_norms(values: Tensor, weight: Tensor) -> Tensor:
    """‖W_h v‖₁ `[B, Hq, T]`, float32, of `values [B, H, T, Dv]`; `weight [Hq, Dm, Dv]`."""

    def summed(projected: Tensor, own: Tensor) -> Tensor:
        return projected.abs_().sum(-1)

    return _in_tiles(values, weight.float().transpose(1, 2), summed)


def _in_tiles(
    values: Tensor, matrices: Tensor, reduce: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """`reduce(v·M_h, v)` `[B, Hq, T]` of each value; `matrices [Hq, Dv, X]`, tiles of tokens.

    `reduce` may overwrite the first one.
    """
    (rows, heads, _, size), columns = values.shape, matrices.shape[2]
    # One product for all query heads of a KV head, whose value they share: [H, Dv, G·X].
    together = matrices.unflatten(0, (heads, -1)).transpose(1, 2).reshape(heads, size, -1)
    most = CPU_TILE if values.device.type == "cpu" else TILE
    tokens = max(1, most // (rows * len(matrices) * columns))
    reduced = []
    for tile in values.split(tokens, 2):
        own = tile.float()
        projected = (own @ together).unflatten(-1, (-1, columns))  # [B, H, t, G, X]
        reduced.append(reduce(projected, own[..., None, :]))
    return torch.cat(reduced, 2).transpose(2, 3).flatten(1, 2)
