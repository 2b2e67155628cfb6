# SPDX-License-Identifier: Apache-2.0
"""Metric of LongBench v2: multiple choice.

Source: THUDM/LongBench `pred.py::extract_answer` and `result.py` (Bai et al., 2024,
arXiv 2412.15204).
"""

from __future__ import annotations

import re

from kvfold.eval.metrics.base import MetricScore

# Expected score of a guess among four options.
CHANCE = 0.25


def letter(prediction: str) -> str | None:
    """The letter after "The correct answer is", with or without brackets; `*` marks are ignored."""
    text = prediction.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(
        r"The correct answer is ([A-D])", text
    )
    return found.group(1) if found else None


def accuracy(prediction: str, answer: str, *, compensated: bool = False) -> MetricScore:
    """1 for the right letter, else 0; without any letter 0, or `CHANCE` if `compensated`."""
    named = letter(prediction)
    if named is None:
        return MetricScore(CHANCE if compensated else 0.0, 'no "The correct answer is (A)"')
    return MetricScore(float(named == answer))
