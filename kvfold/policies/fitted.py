# SPDX-License-Identifier: Apache-2.0
"""Fitted numbers of a method, read for an engine, without a model to compare the file with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfold.errors import ScorerFileError
from kvfold.hf.fitted_numbers import how_to_fit, read_kind
from kvfold.methods.base import Stages
from kvfold.methods.fitted import FittedFile
from kvfold.methods.stages.allocate.parts import Curve, PartsSource
from kvfold.policies.prefill import Prefill


def fitted_in(need: FittedFile | None, prefill: Prefill) -> Any:
    """The fitted numbers in the file of `need`; None without a need.

    Raises ScorerFileError for a file that is not named, damaged, or of other numbers of layers, KV
    heads or RoPE frequencies. Weights cannot be compared: name the file of the engine's model.
    """
    if need is None:
        return None
    if need.file == "none":
        raise ScorerFileError(
            f"{need.kind.method} needs a file that was fitted for the engine's model: "
            f"{how_to_fit(need.kind)}"
        )
    fitted, frequencies = read_kind(need.file, need.kind)
    _check_rope(need.file, frequencies, prefill)
    fitted.check(need.file, prefill.layers, prefill.heads)
    return fitted


def parts_in(stages: Stages, prefill: Prefill) -> Curve | None:
    """Parts of layers or heads in the file that the stages name; None without one.

    Raises KvfoldError as `fitted_in` and `Curve.check` do.
    """
    need: PartsSource | None = getattr(stages.allocate, "parts", None)
    if need is None:
        return None
    if isinstance(need, FittedFile):
        curve: Curve = fitted_in(need, prefill)
        return curve
    parts = need.read()
    parts.check(need.file, prefill.layers, prefill.heads)
    return parts


def _check_rope(file: str, frequencies: list[Tensor], prefill: Prefill) -> None:
    """Raises ScorerFileError if the engine's RoPE is none of the file's."""
    if prefill.rope is None or not frequencies:
        return
    own = prefill.rope.frequencies.cpu().float()
    if not any(f.shape == own.shape and torch.allclose(f.float(), own) for f in frequencies):
        raise ScorerFileError(f"{file} was fitted for a model with other RoPE frequencies")
