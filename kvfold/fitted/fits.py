# SPDX-License-Identifier: Apache-2.0
"""Files fitted for a model (scorers, filters, curves), as a cache's method reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from kvfold.bundled import FOLDER
from kvfold.fitted.file import read_kind
from kvfold.fitted.numbers import Fitted, FittedFile, FittedHeads, FittedMoments, FittedScorer
from kvfold.fitted.of_model import read_fitted
from kvfold.fitted.sources import KINDS, Sources
from kvfold.hf.header import digest, digest_of
from kvfold.hf.models import kv_heads
from kvfold.hf.stock_layers import is_compressible, stock_layers
from kvfold.methods.base import Stages
from kvfold.methods.stages.allocate.parts import Curve, PartsSource
from kvfold.observers.base import Need


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
        return cls(*(_fitted_in(source, model) for source in Sources.of(stages)))

    def of_layer(self, layer: int, heads: slice | None) -> dict[type[Need[Any]], Any]:
        """One layer's scorer, numbers `[H]` of KV heads, and moments of queries of one row.

        `heads` are its KV heads; None: all.
        """
        files = zip(KINDS, (self.scorer, self.heads, self.moments), strict=True)
        return {kind: each.of_layer(layer, heads) for kind, each in files if each is not None}

    def check_entries(self, shapes: Iterable[tuple[int, int, int]]) -> None:
        """Raises ScorerFileError for a fit of entries with other channels than `shapes`."""
        for fitted in vars(self).values():
            if isinstance(fitted, Fitted):
                fitted.check_entries(shapes)

    @property
    def digests(self) -> dict[str, str]:
        """Checksums of what was fitted, by the first method that reads its kind."""
        return _digests(vars(self).values())


def digests_of(stages: Stages) -> dict[str, str]:
    """As `Fits.digests`, of the files that the stages name as they are now, for any model.

    Raises ScorerFileError for a file that is damaged, and KvfoldError for parts that a user wrote.
    """
    return _digests(_read(source) for source in Sources.of(stages) if source is not None)


def _digests(fits: Iterable[Any]) -> dict[str, str]:
    return {each.method: _digest(each) for each in fits if isinstance(each, Fitted)}


def _digest(fitted: Fitted) -> str:
    tensors = {name: tensor.cpu() for name, tensor in fitted.tensors.items()}
    return digest(" ".join(f"{name} {digest_of(tensor)}" for name, tensor in tensors.items()))


def path_of(source: PartsSource) -> str:
    """The source's file; the bundled model's where none is named."""
    if isinstance(source, FittedFile) and source.file == "none":
        return str(FOLDER / source.kind.bundled)
    return source.file


def _read(source: PartsSource) -> Fitted:
    """The content of the source's file, for any model."""
    if isinstance(source, FittedFile):
        return read_kind(path_of(source), source.kind)[0]
    return source.read()


def _fitted_in(source: PartsSource | None, model: PreTrainedModel) -> Any:
    """The content of the source's file, checked to be of the model."""
    if source is None:
        return None
    path = path_of(source)
    if isinstance(source, FittedFile):
        fitted = read_fitted(path, model, source.kind)
    else:
        fitted = source.read()
    fitted.check(path, _layers(model), kv_heads(model))
    return fitted


def _layers(model: PreTrainedModel) -> int:
    """Number of layers that can be compressed."""
    return sum(map(is_compressible, stock_layers(model)))
