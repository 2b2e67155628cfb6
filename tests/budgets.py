# SPDX-License-Identifier: Apache-2.0
"""Every registered method as tests use it: small windows, so that small budgets are legal."""

from __future__ import annotations

import dataclasses

from transformers import PreTrainedModel

import kvfold
from kvfold.method import preset

SMALL = 20  # entries per KV head, of the 24 to 64 tokens that prompts have


def _spec(name: str) -> str:
    options = {field.name for field in dataclasses.fields(preset(name))}
    return f"{name}:window=8" if "window" in options else name


def holds(spec: str) -> bool:
    """Whether the method evicts at every step, so that decoding keeps its size."""
    return kvfold.parse(spec).stages().decode == "hold"


def sums_columns(spec: str) -> bool:
    """Whether kvfold computes the attention itself, to add up its columns."""
    return kvfold.parse(spec).stages().needs.column_sums


def moves(spec: str) -> bool:
    """Whether kept keys are rotated to new positions."""
    return kvfold.parse(spec).stages().positions == "reindex"


METHODS = [_spec(name) for name in kvfold.methods()]
COMPRESSING = [spec for spec in METHODS if kvfold.parse(spec).takes_budget]
HOLDING = [spec for spec in COMPRESSING if holds(spec)]
APPENDING = [spec for spec in COMPRESSING if not holds(spec)]
UNIFORM = [spec for spec in COMPRESSING if "pyramid" not in spec]


def compressed(
    model: PreTrainedModel, spec: str, budget: float | str = SMALL, **options: object
) -> kvfold.CompressedCache:
    """A cache with `budget`, or without one for a method that takes none."""
    given = budget if kvfold.parse(spec).takes_budget else None
    return kvfold.CompressedCache(model, spec, given, **options)
