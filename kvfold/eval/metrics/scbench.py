# SPDX-License-Identifier: Apache-2.0
"""Metrics of SCBench; several are InfiniteBench's.

Source: microsoft/MInference @fb56c91, `scbench/compute_scores.py` (Li et al., 2024,
arXiv 2412.10319).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from kvfold.eval.metrics import infinitebench
from kvfold.eval.metrics.base import MetricScore, best
from kvfold.eval.metrics.overlap import character_f1
from kvfold.eval.metrics.rouge import google


def listed(label: Any) -> list[Any]:
    """A label as a list; some labels in the data are single values."""
    return list(label) if isinstance(label, list | tuple) else [label]


def contained(prediction: str, label: str | Sequence[str]) -> MetricScore:
    """1 if the label is a substring of the prediction, case-sensitive (kv, prefix_suffix)."""
    return MetricScore(float(listed(label)[0] in prediction))


def any_contained(prediction: str, label: str | Sequence[str]) -> MetricScore:
    """1 if any label is a substring of the prediction, case ignored (qa_eng, many_shot)."""
    text = prediction.strip().upper()
    return MetricScore(float(any(str(one).upper() in text for one in listed(label))))


def first_number(prediction: str, label: Any) -> MetricScore:
    """1 if the first number is the label; truncated to an integer for an integer label (mf)."""
    expected, number = listed(label)[0], infinitebench.NUMBER.search(prediction)
    if number is None:
        return MetricScore(0.0, infinitebench.NO_NUMBER)
    found = float(number.group())
    if math.isinf(found):
        return MetricScore(0.0, "the first number is beyond every label")
    return MetricScore(float(type(expected)(found) == expected))


def string_match_all(prediction: str, label: Any) -> MetricScore:
    """RULER's `string_match_all` without its cleaning, rounded to 2 decimals per sample (vt)."""
    names, text = listed(label), prediction.lower()
    return MetricScore(round(sum(name.lower() in text for name in names) / len(names), 2))


METRICS: dict[str, tuple[str, Callable[[str, Any], MetricScore]]] = {
    "kv": ("substring", contained),
    "prefix_suffix": ("substring", contained),
    "vt": ("string_match_all", string_match_all),
    "qa_eng": ("any substring", any_contained),
    "qa_chn": (
        "character F1",
        lambda text, label: best(character_f1(text, one) for one in listed(label)),
    ),
    "choice_eng": ("option", lambda text, label: infinitebench.option(text, listed(label))),
    "many_shot": ("any substring", any_contained),
    "mf": ("first number", first_number),
    "summary": ("rougeLsum", lambda text, label: google(text, listed(label), "rougeLsum")),
}
