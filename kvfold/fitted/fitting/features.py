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
