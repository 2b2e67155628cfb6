# SPDX-License-Identifier: Apache-2.0
"""What every metric answers with, and how it reaches the library that computes it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvfold.errors import KvfoldError


@dataclass(frozen=True, slots=True)
class Scored:
    """One prediction's score in [0, 1], and what went wrong where it is not to be trusted.

    `failed` names why the prediction could not be parsed or scored; `value` is then what the
    benchmark counts, usually 0. `weight` is the sample's share of the task's mean.
    """

    value: float
    failed: str | None = None
    weight: float = 1.0


def best(scores: Iterable[Scored]) -> Scored:
    """The highest score over several references; a failure on any of them stays visible.

    Raises ValueError where there is no reference.
    """
    scores = list(scores)
    value = max(score.value for score in scores)
    return Scored(value, next((score.failed for score in scores if score.failed), None))


def mean(scores: Iterable[Scored]) -> float:
    """The weighted mean; NaN where there is nothing to average."""
    scores = list(scores)
    weight = sum(score.weight for score in scores)
    return sum(score.value * score.weight for score in scores) / weight if weight else float("nan")


def library(module: str) -> Any:
    """An optional library; raises KvfoldError with the way to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise KvfoldError(
            f"this metric needs {missing.name or module}: pip install 'kvfold[eval]'"
        ) from missing
