# SPDX-License-Identifier: Apache-2.0
"""Held-out measurements of a scorer beside the method that it learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.fitted.fitting.target import ScoredText

BUDGETS = (0.5, 0.3, 0.2, 0.1)  # parts of the entries at which both choices are compared


@dataclass(frozen=True)
class HeldOut:
    """Comparison of a scorer's choices with its target's, each one pool over layers and KV heads.

    By kept part of the entries: `overlap`, the part of the target's kept entries that the scorer
    keeps too, and `mass`, the target's scores that it keeps, as part of the most possible. `loss`
    is the mean squared error in ln of the score, `loss_of_means` that of each head's mean, which
    tells no entry from another.
    """

    overlap: dict[float, float]
    mass: dict[float, float]
    loss: float
    loss_of_means: float

    @property
    def mean_overlap(self) -> float:
        """Mean of the overlaps."""
        return sum(self.overlap.values()) / len(self.overlap)


def compare(expected: Tensor, text: ScoredText) -> HeldOut:
    """Comparison on one text, its opening left out; `expected [L, H, T]` is ln of the score."""
    own = slice(text.opening, None)
    expected, scores, targets = (x[..., own] for x in (expected, text.scores, text.targets))
    flat, pool = scores.flatten(), expected.flatten()
    ranked, wanted = pool.argsort(descending=True), flat.argsort(descending=True)
    overlap, mass = {}, {}
    for part in BUDGETS:
        count = int(part * flat.numel())
        kept = torch.zeros_like(flat, dtype=torch.bool)
        kept[ranked[:count]] = True
        overlap[part] = float(kept[wanted[:count]].float().mean())
        mass[part] = float(flat[kept].double().sum() / flat[wanted[:count]].double().sum())
    means = targets.mean(-1, keepdim=True)
    loss, of_means = (float((targets - x).square().mean()) for x in (expected, means))
    return HeldOut(overlap, mass, loss, of_means)


def mean_of(found: Sequence[HeldOut]) -> HeldOut:
    """Mean of the comparisons of several texts."""
    count = len(found)
    return HeldOut(
        {part: sum(each.overlap[part] for each in found) / count for part in BUDGETS},
        {part: sum(each.mass[part] for each in found) / count for part in BUDGETS},
        sum(each.loss for each in found) / count,
        sum(each.loss_of_means for each in found) / count,
    )
