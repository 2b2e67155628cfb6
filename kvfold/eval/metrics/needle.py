# SPDX-License-Identifier: Apache-2.0
"""Needle in a haystack without a judge: keywords, and for comparison the ROUGE of the papers.

ROUGE against the needle rewards repeating the question: a wrong answer in the needle's words
scores as much as a short right one, so it is reported and never ranked by.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfold.eval.metrics.rouge import google, pltrdy
from kvfold.eval.metrics.scored import Scored


def keywords(prediction: str, expected: Sequence[str]) -> Scored:
    """1 where every keyword is in the prediction, case ignored."""
    text = prediction.lower()
    return Scored(float(all(word.lower() in text for word in expected)))


def rouge_1(prediction: str, needle: str) -> Scored:
    """F of ROUGE-1; KVCache-Factory's `run_needle_in_haystack.py` prints ten times as much."""
    return google(prediction, [needle], "rouge1")


def rouge_l(prediction: str, needle: str) -> Scored:
    """F of ROUGE-L of the package `rouge`, as kvpress reports it."""
    return pltrdy(prediction, needle)
