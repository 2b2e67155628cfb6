# SPDX-License-Identifier: Apache-2.0
"""Features of entries that a scorer weighs: scaled numbers, and random projections of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.fitted.fitting.target import ScoredText
from kvfold.methods.stages.score.learned import widened

PROJECTIONS = 0, 64, 256  # numbers of projections among which validation chooses
SPREAD = 1.5  # standard deviation of a projection of features whose mean square is 1


@dataclass(frozen=True)
class Features:
    """Scaling and random projections of features: `scales [L, H, F]`, `projections [F, P]`."""

    scales: Tensor
    projections: Tensor

    @classmethod
    def of_first(cls, text: ScoredText, seed: int) -> Features:
        """Scales that bring each feature's mean square in a first text to 1."""
        scales = text.features.double().square().mean(2).sqrt().clamp(min=1e-6).float().cpu()
        size, most = scales.shape[-1], max(PROJECTIONS)
        draw = torch.randn(
            size, most, generator=torch.Generator().manual_seed(seed), dtype=torch.float32
        )
        return cls(scales, draw * (SPREAD / size**0.5))

    def of_layer(self, text: ScoredText, layer: int) -> Tensor:
        """All features `[H, T, F + P]` of a text's entries in one layer."""
        features = text.features[layer]
        scaled = features / self.scales[layer][:, None].to(features.device)
        return widened(scaled, self.projections.to(features.device))

    def expected(self, text: ScoredText, weights: Tensor, chosen: Tensor) -> Tensor:
        """ln of the scores `[L, H, T]` by `weights [L, H, f]` of the features at `chosen [f]`."""
        found = []
        for layer, of_layer in enumerate(weights):
            rows = self.of_layer(text, layer)[..., chosen]
            found.append((rows @ of_layer.float()[..., None].to(rows.device)).squeeze(-1))
        return torch.stack(found)


@dataclass
class RidgeSums:
    """Sums over the rows x, y of M linear models: `gram [M, F, F]` of x·xᵀ, `cross [M, F]` of x·y.

    Float64. `count` is the number of rows of each model.
    """

    gram: Tensor
    cross: Tensor
    count: int = 0

    @classmethod
    def empty(cls, models: int, features: int) -> RidgeSums:
        """Sums over no rows."""
        gram = torch.zeros(models, features, features, dtype=torch.float64)
        return cls(gram, torch.zeros(models, features, dtype=torch.float64))

    def add(self, first: int, features: Tensor, targets: Tensor) -> None:
        """Adds rows of the models from `first` on: features `[m, n, F]`, targets `[m, n]`.

        Rows of model 0 are counted: all models get equally many.
        """
        rows, wanted = features.double().cpu(), targets.double().cpu()
        these = slice(first, first + len(rows))
        self.gram[these] += rows.mT @ rows
        self.cross[these] += (rows.mT @ wanted[..., None]).squeeze(-1)
        if first == 0:
            self.count += rows.shape[1]

    def solve(self, chosen: Tensor, penalty: float, free: int) -> Tensor:
        """Ridge weights `[M, f]`, float64, of the features at `chosen [f]`.

        They minimize Σ(y − w·x)² + penalty·n·Σw² over n rows; the second sum leaves out the
        constant feature `free`.
        """
        added = torch.diag(penalty * self.count * (chosen != free).double())
        solved = []
        for gram, cross in zip(self.gram, self.cross, strict=True):
            solved.append(torch.linalg.solve(gram[chosen][:, chosen] + added, cross[chosen]))
        return torch.stack(solved)
