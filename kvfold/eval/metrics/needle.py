# SPDX-License-Identifier: Apache-2.0
"""Metrics of needle in a haystack: keywords, a number, and for comparison the papers' ROUGE.

ROUGE against the needle rewards repeating the question: a wrong answer in the needle's words
scores as much as a short right one. So it is reported, but not the task's score.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvfold.eval.metrics.base import MetricScore
from kvfold.eval.metrics.rouge import google, pltrdy
from kvfold.eval.metrics.words import ascii_digits

# Digits, or groups of three with one separator between them: 48213, 48,213, 48.213, 48 213.
_NUMBER = re.compile(r"(?<!\d)\d{1,3}(?:[ ,.'’\u00a0\u2009\u202f\u066c]\d{3})+(?!\d)|\d+")


def keywords(prediction: str, expected: Sequence[str]) -> MetricScore:
    """1 if every keyword is in the prediction, case ignored."""
    text = prediction.lower()
    return MetricScore(float(all(word.lower() in text for word in expected)))


def number(prediction: str, expected: Sequence[str]) -> MetricScore:
    """1 if every expected number is one of the prediction's, in digits of any script."""
    found = {_digits(spelled) for spelled in _NUMBER.findall(prediction)}
    return MetricScore(float(all(_digits(each) in found for each in expected)))


def first_number(prediction: str, expected: Sequence[str]) -> MetricScore:
    """1 if the prediction's first number is one of the expected, in digits of any script."""
    first = _NUMBER.search(prediction)
    if first is None:
        return MetricScore(0.0, "no number in the prediction")
    return MetricScore(float(_digits(first.group()) in map(_digits, expected)))


def _digits(spelled: str) -> str:
    """A number's digits as ASCII, without separators."""
    return "".join(filter(str.isdecimal, ascii_digits(spelled)))


def rouge_1(prediction: str, needle: str) -> MetricScore:
    """F-measure of ROUGE-1; KVCache-Factory's `run_needle_in_haystack.py` prints ten times that."""
    return google(prediction, [needle], "rouge1")


def rouge_l(prediction: str, needle: str) -> MetricScore:
    """F-measure of ROUGE-L by package `rouge`, as kvpress reports it."""
    return pltrdy(prediction, needle)
