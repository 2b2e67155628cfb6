# SPDX-License-Identifier: Apache-2.0
"""Least squares by normal equations: non-negative, or with ridge towards a start.

Several problems at once, `[…]`: an unknown that a problem lacks has zeros for its row and column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.interruption import check_interrupted

TRIES = 3  # full exchanges without progress before single ones
EXCHANGES = 10  # most exchanges, per unknown: a bound that is not reached
STEPS = 8  # of power iteration, which positive matrices need few of


def largest_eigenvalue(normal: Tensor) -> Tensor:
    """Largest eigenvalues `[…]` of symmetric matrices `[…, t, t]` without negative ones, nearly."""
    top = torch.ones_like(normal[..., :1])
    for _ in range(STEPS):
        top = torch.nn.functional.normalize(normal @ top, dim=-2)
    return (top * (normal @ top)).sum((-1, -2))


def nonnegative(normal: Tensor, toward: Tensor, real: Tensor) -> Tensor:
    """Weights w ≥ 0 `[H, t]` that minimize ½ wᵀAw − bᵀw, 0 where `real [H, t]` is False.

    A is `normal [H, t, t]`, b `toward [H, t]`. Block principal pivoting, float64: unknowns of the
    wrong sign change sides together, and one by one where that makes no progress. Source: Kim and
    Park, SIAM J. Sci. Comput. 33(6), algorithm 2.
    """
    heads, count = toward.shape
    diagonal = normal.diagonal(dim1=-2, dim2=-1).sum(-1) / real.sum(-1).clamp(min=1)
    jitter = 1e-12 * diagonal.clamp(min=torch.finfo(normal.dtype).tiny)
    one = torch.eye(count, dtype=normal.dtype, device=normal.device)
    normal = normal + jitter[:, None, None] * one
    free, weights = real.clone(), torch.zeros_like(toward)
    best = torch.full((heads,), count + 1, device=normal.device)
    tries = torch.full_like(best, TRIES)
    slack = 1e-10 * toward.abs().amax(-1, keepdim=True) if count else 0.0
    index = torch.arange(count, device=normal.device)
    for _ in range(EXCHANGES * count):
        check_interrupted()
        both = free[:, :, None] & free[:, None]
        factor = torch.linalg.cholesky(torch.where(both, normal, one))
        weights = torch.cholesky_solve((toward * free)[..., None], factor)[..., 0]
        slope = (normal @ weights[..., None])[..., 0] - toward
        wrong = real & torch.where(free, weights < 0, slope < -slack)
        found = wrong.sum(-1)
        if not bool(found.any()):
            break
        better = found < best
        single = ~better & (tries == 0)
        best = torch.where(better, found, best)
        tries = torch.where(better, TRIES, (tries - 1).clamp(min=0))
        last = (wrong * index).amax(-1, keepdim=True)
        free = free ^ (wrong & (~single[:, None] | (index == last)))
    return weights.clamp(min=0)


def ridge_towards(start: Tensor, normal: Tensor, toward: Tensor, ridge: Tensor) -> Tensor:
    """C `[…, t, Dv]` that minimizes ‖XC − Y‖² + ridge·‖C − start‖², with a `ridge […]` above 0.

    `normal` is XᵀX `[…, t, t]`, `toward` is Xᵀ(Y − X·start) `[…, t, Dv]`.
    """
    held = normal.clone()
    held.diagonal(dim1=-2, dim2=-1).add_(ridge[..., None])
    return start + torch.cholesky_solve(toward, torch.linalg.cholesky(held))
