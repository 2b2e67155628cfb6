# SPDX-License-Identifier: Apache-2.0
"""Least squares by normal equations: non-negative, or with ridge towards a start."""

from __future__ import annotations

import torch
from torch import Tensor

TRIES = 3  # full exchanges without progress before single ones
EXCHANGES = 10  # most exchanges, per unknown: a bound that is not reached


def largest_eigenvalue(normal: Tensor) -> Tensor:
    """Largest eigenvalue of a symmetric matrix `[t, t]` without negative entries, nearly."""
    top = torch.ones_like(normal[0]) if len(normal) else normal.new_zeros(0)
    for _ in range(20):
        top = torch.nn.functional.normalize(normal @ top, dim=0)
    return top @ normal @ top


def nonnegative(normal: Tensor, toward: Tensor) -> Tensor:
    """Weights w ≥ 0 `[t]` that minimize ½ wᵀAw − bᵀw; A is `normal [t, t]`, b `toward [t]`.

    Block principal pivoting, float64: unknowns of the wrong sign change sides together, and one by
    one where that makes no progress. Source: Kim and Park, SIAM J. Sci. Comput. 33(6), algorithm 2.
    """
    count = len(normal)
    jitter = 1e-12 * normal.diagonal().mean().clamp(min=torch.finfo(normal.dtype).tiny)
    normal = normal + jitter * torch.eye(count, dtype=normal.dtype, device=normal.device)
    free = torch.ones(count, dtype=torch.bool, device=normal.device)
    best, tries, slack = count + 1, TRIES, 1e-10 * toward.abs().amax()
    weights = torch.zeros_like(toward)
    for _ in range(EXCHANGES * count):
        weights = torch.zeros_like(toward)
        factor = torch.linalg.cholesky(normal[free][:, free])
        weights[free] = torch.cholesky_solve(toward[free, None], factor)[:, 0]
        slope = normal @ weights - toward
        wrong = (free & (weights < 0)) | (~free & (slope < -slack))
        found = int(wrong.sum())
        if found == 0:
            break
        if found < best:
            best, tries = found, TRIES
        elif tries > 0:
            tries -= 1
        else:
            last = wrong.nonzero()[-1]
            wrong = torch.zeros_like(wrong).index_fill_(0, last, True)
        free = free ^ wrong
    return weights.clamp(min=0)


def ridge_towards(start: Tensor, normal: Tensor, toward: Tensor, ridge: Tensor) -> Tensor:
    """C `[t, Dv]` that minimizes ‖XC − Y‖² + ridge·‖C − start‖².

    `normal` is XᵀX `[t, t]`, `toward` is Xᵀ(Y − X·start) `[t, Dv]`.
    """
    held = normal + ridge * torch.eye(len(normal), dtype=normal.dtype, device=normal.device)
    return start + torch.cholesky_solve(toward, torch.linalg.cholesky(held))
