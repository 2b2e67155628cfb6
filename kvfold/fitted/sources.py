# SPDX-License-Identifier: Apache-2.0
"""Sources of stages: files of fits, and parts that users wrote; without transformers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.errors import ScorerFileError
from kvfold.fitted.file import how_to_fit, read_kind
from kvfold.fitted.numbers import Fitted, FittedFile
from kvfold.methods.base import Across, Stages
from kvfold.methods.stages.allocate.parts import Curve, PartsSource
from kvfold.observers.base import Need
from kvfold.observers.fitted import EntryScorer, HeadNumbers
from kvfold.observers.query_moments import QueryMomentsNeed

# Needs that read a file, in the order of the fields of `Sources`.
KINDS: tuple[type[Need[Any]], ...] = (EntryScorer, HeadNumbers, QueryMomentsNeed)


class Sources(NamedTuple):
    """Where stages find a scorer, numbers of heads, moments of queries, and parts; None: unread."""

    scorer: PartsSource | None
    heads: PartsSource | None
    moments: PartsSource | None
    parts: PartsSource | None

    @classmethod
    def of(cls, stages: Stages) -> Sources:
        """Those that the stages name."""
        scorer, heads, moments = (getattr(stages.needs.get(kind), "file", None) for kind in KINDS)
        return cls(scorer, heads, moments, getattr(stages.allocate, "parts", None))


def with_parts(stages: Stages, curve: Curve | None) -> Stages:
    """The stages, whose allocation shares a budget by `curve`; None: as they are."""
    allocate = stages.allocate
    if curve is None or not isinstance(allocate, Across):
        return stages
    share = partial(allocate.share, parts=curve)
    return replace(stages, allocate=replace(allocate, share=share, per_head=curve.per_head))


def fitted_for_engine(
    source: PartsSource | None, layers: int, heads: int | None, ropes: Iterable[Tensor]
) -> Any:
    """The numbers in the file of `source`, for an engine's model; None without one.

    `ropes` are the RoPE frequencies of its layers. Raises ScorerFileError for a file that is not
    named, damaged, or of other numbers of layers, KV heads or RoPE frequencies, and KvfoldError for
    such parts that a user wrote. Weights cannot be compared: name the file of the engine's model.
    """
    if source is None:
        return None
    fitted = _fit(source, ropes) if isinstance(source, FittedFile) else source.read()
    fitted.check(source.file, layers, heads)
    return fitted


def _fit(source: FittedFile, ropes: Iterable[Tensor]) -> Fitted:
    """The fits of a model with the engine's RoPE."""
    if source.file == "none":
        raise ScorerFileError(
            f"{source.kind.method} needs a file that was fitted for the engine's model: "
            f"{how_to_fit(source.kind)}"
        )
    fitted, known = read_kind(source.file, source.kind)
    for own in ropes if known else ():
        if not any(f.shape == own.shape and torch.allclose(f.float(), own) for f in known):
            raise ScorerFileError(
                f"{source.file} was fitted for a model with other RoPE frequencies"
            )
    return fitted
