# SPDX-License-Identifier: Apache-2.0
"""Result type of all metrics, its aggregates, and the import of optional libraries."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvfold.errors import KvfoldError


@dataclass(frozen=True, slots=True)
class MetricScore:
    """One prediction's score `value` in [0, 1].

    `failed` is the reason if the prediction could not be parsed or scored; `value` is then the
    benchmark's default, usually 0. `weight` is the sample's weight in the task's mean.
    """

    value: float
    failed: str | None = None
    weight: float = 1.0


def best(scores: Iterable[MetricScore]) -> MetricScore:
    """The highest score over several references, with the first failure on any of them.

    Raises ValueError without references.
    """
    scores = list(scores)
    value = max(score.value for score in scores)
    return MetricScore(value, next((score.failed for score in scores if score.failed), None))


def mean(scores: Iterable[MetricScore]) -> float:
    """The weighted mean; NaN if the weights sum to 0."""
    scores = list(scores)
    weight = sum(score.weight for score in scores)
    return sum(score.value * score.weight for score in scores) / weight if weight else float("nan")


def library(module: str) -> Any:
    """The imported optional module; raises KvfoldError with the install command if missing."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise KvfoldError(
            f"this metric needs {missing.name or module}: pip install 'kvfold[eval]'"
        ) from missing
