# SPDX-License-Identifier: Apache-2.0
"""Fitted numbers of a method, read for an engine, without a model to compare the file with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfold.errors import ScorerFileError
from kvfold.hf.fitted_numbers import how_to_fit, read_kind
from kvfold.methods.fitted import Fitted, FittedFile
from kvfold.methods.stages.allocate.parts import PartsSource
from kvfold.policies.prefill import Prefill


def fitted_in(source: PartsSource | None, prefill: Prefill) -> Any:
    """The numbers in the file of `source`; None without one.

    Raises ScorerFileError for a file that is not named, damaged, or of other numbers of layers, KV
    heads or RoPE frequencies, and KvfoldError for such parts that a user wrote. Weights cannot be
    compared: name the file of the engine's model.
    """
    if source is None:
        return None
    fitted = _fit(source, prefill) if isinstance(source, FittedFile) else source.read()
    fitted.check(source.file, prefill.layers, prefill.heads)
    return fitted


def _fit(source: FittedFile, prefill: Prefill) -> Fitted:
    """What was fitted for a model with the engine's RoPE."""
    if source.file == "none":
        raise ScorerFileError(
            f"{source.kind.method} needs a file that was fitted for the engine's model: "
            f"{how_to_fit(source.kind)}"
        )
    fitted, frequencies = read_kind(source.file, source.kind)
    _check_rope(source.file, frequencies, prefill)
    return fitted


def _check_rope(file: str, frequencies: list[Tensor], prefill: Prefill) -> None:
    """Raises ScorerFileError if a layer's RoPE is none of the file's."""
    if not frequencies:
        return
    ropes = map(prefill.rope_of, range(prefill.layers))
    for rope in {rope for rope in ropes if rope is not None}:
        own = rope.frequencies.cpu().float()
        if not any(f.shape == own.shape and torch.allclose(f.float(), own) for f in frequencies):
            raise ScorerFileError(f"{file} was fitted for a model with other RoPE frequencies")
