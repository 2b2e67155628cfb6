# SPDX-License-Identifier: Apache-2.0
"""Files fitted for a model (scorers, filters, curves), as a cache's method reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvfold.bundled import FOLDER
from kvfold.hf.header import digest, digest_of
from kvfold.hf.models import kv_heads
from kvfold.hf.scorer_file import read_fitted
from kvfold.hf.stock_layers import is_compressible, stock_layers
from kvfold.kernels.query_moments import QueryMoments
from kvfold.methods.base import Stages
from kvfold.methods.fitted import (
    Fitted,
    FittedFile,
    FittedHeads,
    FittedMoments,
    FittedScorer,
    LayerScores,
)
from kvfold.methods.stages.allocate.parts import Curve, PartsSource


@dataclass(frozen=True)
class Fits:
    """Fits that the stages read; None for those that they do not."""

    scorer: FittedScorer | None
    heads: FittedHeads | None
    moments: FittedMoments | None
    curve: Curve | None  # parts of layers or heads

    @classmethod
    def of(cls, stages: Stages, model: PreTrainedModel) -> Fits:
        """Fits in the files that the stages name.

        Raises ScorerFileError for a file that is damaged, or of another model, RoPE or dtype, or of
        other numbers of layers and heads, and KvfoldError for such parts that a user wrote.
        """
        needs = stages.needs
        moments = None if needs.query_moments is None else needs.query_moments.fitted
        return cls(
            _fitted_in(needs.scorer, model),
            _fitted_in(needs.fitted_heads, model),
            _fitted_in(moments, model),
            _curve(stages, model),
        )

    def of_layer(
        self, layer: int, heads: slice | None
    ) -> tuple[LayerScores | None, Tensor | None, QueryMoments | None]:
        """One layer's scorer, numbers `[H]` of KV heads, and moments of queries of one row.

        `heads` are its KV heads; None: all.
        """
        scorer, numbers, moments = self.scorer, self.heads, self.moments
        return (
            None if scorer is None else scorer.of_layer(layer, heads),
            None if numbers is None else numbers.of_layer(layer, heads),
            None if moments is None else moments.of_layer(layer, heads),
        )

    @property
    def digests(self) -> dict[str, str]:
        """Checksums of what was fitted, by the first method that reads its kind."""
        fits = [each for each in vars(self).values() if isinstance(each, Fitted)]
        return {each.method: _digest(each) for each in fits}


def _digest(fitted: Fitted) -> str:
    tensors = {name: tensor.cpu() for name, tensor in fitted.tensors.items()}
    return digest(" ".join(f"{name} {digest_of(tensor)}" for name, tensor in tensors.items()))


def _fitted_in(need: FittedFile | None, model: PreTrainedModel) -> Any:
    if need is None:
        return None
    path = str(FOLDER / need.kind.bundled) if need.file == "none" else need.file
    fitted = read_fitted(path, model, need.kind)
    fitted.check(path, _layers(model), kv_heads(model))
    return fitted


def _layers(model: PreTrainedModel) -> int:
    """Number of layers that can be compressed."""
    return sum(map(is_compressible, stock_layers(model)))


def _curve(stages: Stages, model: PreTrainedModel) -> Curve | None:
    """Parts of layers or heads that the stages share a budget by."""
    need: PartsSource | None = getattr(stages.allocate, "parts", None)
    if need is None:
        return None
    if isinstance(need, FittedFile):
        curve: Curve = _fitted_in(need, model)
        return curve
    parts = need.read()
    parts.check(need.file, _layers(model), kv_heads(model))
    return parts
