# SPDX-License-Identifier: Apache-2.0
"""Metrics of RULER: two string matches.

Source: NVIDIA/RULER `scripts/eval/synthetic/constants.py` and the post-processing of
`scripts/eval/evaluate.py` (Hsieh et al., 2024, arXiv 2404.06654, section 4).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvfold.eval.metrics.base import MetricScore


def cleaned(prediction: str) -> str:
    """The prediction with control characters replaced by line breaks, which keeps lines apart."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def string_match_all(prediction: str, answers: Sequence[str]) -> MetricScore:
    """Fraction of the answers found in the prediction, case ignored (all tasks but qa)."""
    return MetricScore(sum(_found(prediction, answers)) / len(answers))


def string_match_part(prediction: str, answers: Sequence[str]) -> MetricScore:
    """1 if any of the answers is found, as they are paraphrases of one another (qa)."""
    return MetricScore(float(any(_found(prediction, answers))))


def _found(prediction: str, answers: Sequence[str]) -> list[bool]:
    text = cleaned(prediction).lower()
    return [answer.lower() in text for answer in answers]
