# SPDX-License-Identifier: Apache-2.0
"""Leverage scores of keys before RoPE: how little the other keys span a key (Compactor)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.methods.observation import Observation

TRIES = 5  # factors of ten by which the jitter grows until a factorization succeeds


def leverage_scores(
    observation: Observation, sketch: int, jitter: float, among: Tensor | None = None
) -> Tensor:
    """Leverage scores `[B, H, T]`, float32: x·(XᵀX + jitter·I)⁻¹·xᵀ of each row x of X.

    X are the un-rotated keys without their mean; keys of more than `sketch` channels are projected
    to as many by one Gaussian matrix per layer, of variance 1 / sketch. Only entries that
    `among [B, H, T]` marks take part, None for all; the others score 0. NaN if no jitter suffices.
    """
    real = observation.positions >= 0
    mask = (real if among is None else real & among)[..., None]
    keys = observation.unrotated().masked_fill(~mask, 0)
    centred = (keys - keys.sum(2, keepdim=True) / mask.sum(2, keepdim=True).clamp(min=1)) * mask
    size = centred.shape[-1]
    if size > sketch:
        generator = torch.Generator().manual_seed(observation.seed)
        gaussian = torch.randn(size, sketch, generator=generator, dtype=torch.float32) / sketch**0.5
        centred = centred @ gaussian.to(centred.device)
    exact = centred.double()  # so that rounding needs no larger jitter
    factor = _factor(exact.transpose(-1, -2) @ exact, jitter)
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    inverse: Tensor = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    return (centred @ inverse.transpose(-1, -2).float()).square().sum(-1)


def _factor(gram: Tensor, jitter: float) -> Tensor:
    """Cholesky factors `[B, H, k, k]` of gram + jitter·I, each with the least jitter it needs."""
    diagonal = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    added = torch.full_like(gram[..., :1, :1], jitter)
    for _ in range(TRIES):
        factor: Tensor
        factor, info = torch.linalg.cholesky_ex(gram + added * diagonal)
        failed: Tensor = (info > 0)[..., None, None]
        if not bool(failed.any()):
            break
        added = torch.where(failed, 10 * added, added)
    return factor.masked_fill(failed, torch.nan)
