# SPDX-License-Identifier: Apache-2.0
"""Scores by a fitted linear scorer, from an entry's un-rotated key, its value and their norms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvfold.fitted.numbers import Fitted, ScoredEntries

if TYPE_CHECKING:
    from kvfold.methods.observation import Observation


def entry_features(keys: Tensor, values: Tensor) -> Tensor:
    """Features `[…, D + Dv + 3]` of entries, float32: key, value, their norms, and 1.

    Un-rotated keys `[…, D]`, values `[…, Dv]`.
    """
    keys, values = keys.float(), values.float()
    norms = [entries.norm(dim=-1, keepdim=True) for entries in (keys, values)]
    return torch.cat([keys, values, *norms, torch.ones_like(norms[0])], -1)


def widened(features: Tensor, projections: Tensor) -> Tensor:
    """Features `[…, F]`, followed by tanh of P random projections of them `[F, P]`."""
    return torch.cat([features, torch.tanh(features @ projections)], -1)


@dataclass(frozen=True, eq=False)
class Scorer(Fitted):
    """A linear model for each layer and KV head of one model: entry → ln of its score.

    `weights [L, H, F + P]`, `scales [L, H, F]` that features are divided by, and `projections
    [F, P]`, float32; F = D + Dv + 3 features, P random projections.
    """

    method: ClassVar[str] = "zap"
    command: ClassVar[str] = "kvfold fit MODEL TEXTS"
    bundled: ClassVar[str] = "scorer.safetensors"
    axes: ClassVar[dict[str, str]] = {"weights": "LHW", "scales": "LHF", "projections": "FP"}
    weights: Tensor
    scales: Tensor
    projections: Tensor

    def problem(self) -> str | None:
        """As of all fits; and weights of other features."""
        found = super().problem()
        if found is None and self.sizes["W"] != self.sizes["F"] + self.sizes["P"]:
            found = f"weights has the shape {list(self.weights.shape)}"
        return found

    def fits(self, key: int, value: int) -> bool:
        """True if features are of entries with so many channels."""
        return self.sizes["F"] == key + value + 3

    def of_layer(self, layer: int, heads: slice | None = None) -> LayerScorer:
        """The scorer of one layer, of its KV heads `heads` (None: all)."""
        own = heads or slice(None)
        return LayerScorer(self.weights[layer, own], self.scales[layer, own], self.projections)


@dataclass(frozen=True, eq=False)
class LayerScorer:
    """A scorer of one layer: `weights [H, F + P]`, `scales [H, F]`, `projections [F, P]`."""

    weights: Tensor
    scales: Tensor
    projections: Tensor

    @cached_property
    def _scaled(self) -> tuple[Tensor, Tensor]:
        """Weights `[H, F]` and projections `[H, F, P]` of features that are not scaled."""
        size = self.scales.shape[-1]
        return (self.weights[:, :size] / self.scales, self.projections / self.scales[..., None])

    def __call__(self, keys: Tensor, values: Tensor) -> Tensor:
        """Scores `[B, H, T]`, float32, of un-rotated keys `[B, H, T, D]` and values `[…, Dv]`."""
        features = entry_features(keys, values)
        linear, projections = (each.to(features.device) for each in self._scaled)
        scores = (features @ linear[..., None]).squeeze(-1)
        if not projections.shape[-1]:
            return scores
        size = self.scales.shape[-1]
        tanh = torch.tanh_(features @ projections)
        of_projections = self.weights[:, size:, None].to(tanh.device)
        return scores + (tanh @ of_projections).squeeze(-1)

    def of(self, observation: ScoredEntries) -> Tensor:
        """Scores `[B, H, T]`, float32, of an observation's entries."""
        return self(observation.unrotated(), observation.values)

    def __deepcopy__(self, memo: Any) -> LayerScorer:
        return self


def learned(observation: Observation) -> Tensor:
    """Score that the fitted scorer gives each entry `[B, H, T]`, float32."""
    return observation.learned_scores()
