# SPDX-License-Identifier: Apache-2.0
"""Metrics of InfiniteBench, one per task: a prediction against the label of the data.

Source: OpenBMB/InfiniteBench @88b3daa, `src/compute_scores.py` (Zhang et al., 2024,
arXiv 2402.13718). Values equal the benchmark's; predictions it cannot parse are also `failed`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from kvfold.eval.metrics.base import MetricScore, best
from kvfold.eval.metrics.overlap import character_f1, qa_f1
from kvfold.eval.metrics.rouge import google

NUMBER = re.compile(r"\d+\.\d+|\d+")
MOST_DIGITS = 4300  # that int() reads
NO_NUMBER = "no number in the prediction"
NO_OPTION = "no option is named in the prediction"


def _spaced(text: str, characters: str) -> str:
    return text.translate(str.maketrans(characters, " " * len(characters)))


def first_integer(prediction: str, label: str) -> MetricScore:
    """1 if the first run of digits is the label (passkey, number_string)."""
    digits = re.search("[0-9]+", prediction)
    return MetricScore(float(digits.group() == label)) if digits else MetricScore(0.0, NO_NUMBER)


def word(prediction: str, label: str) -> MetricScore:
    """1 if the label is a word of the prediction without punctuation (kv_retrieval)."""
    return MetricScore(float(label in _spaced(prediction, "\n:\"'.,?!{}").split()))


def last_integer(prediction: str, label: int) -> MetricScore:
    """1 if the last word is the label (code_run)."""
    words = _spaced(prediction.strip(), "\n.`'\":").split()
    try:
        return MetricScore(float(int(words[-1]) == label))
    except (IndexError, ValueError):
        return MetricScore(0.0, "the prediction's last word is no integer")


def first_number(prediction: str, label: int | float) -> MetricScore:
    """1 if the first number is the label; a fraction fails for an integer label (math_find)."""
    number = NUMBER.search(prediction)
    if number is None:
        return MetricScore(0.0, NO_NUMBER)
    try:
        return MetricScore(float(type(label)(number.group()) == label))
    except ValueError:
        return MetricScore(0.0, f"{number.group()} is no integer")


def prefix(prediction: str, label: Sequence[int]) -> MetricScore:
    """Fraction of the label's numbers before the first wrong one (math_calc)."""
    runs = re.findall("[0-9]+", prediction)
    if not runs:
        return MetricScore(0.0, NO_NUMBER)
    # A longer run, such as an endless repetition, is no label's number.
    numbers = [int(digits) if len(digits) <= MOST_DIGITS else None for digits in runs]
    pairs = zip(numbers, label, strict=False)
    right = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(numbers), len(label)))
    return MetricScore(right / len(label))


def speaker(prediction: str, label: Sequence[str]) -> MetricScore:
    """1 if the first label is a word of the upper-cased prediction (longdialogue_qa_eng)."""
    words = _spaced(prediction, "\n:\"'.,?!{}").upper().split()
    return MetricScore(float(label[0] in words))


def _after(text: str, announcements: Sequence[str]) -> str | None:
    """Text after the first announcement found, minus one character; None without any."""
    for announcement in announcements:
        start = text.find(announcement)
        if start >= 0:
            return text[start + len(announcement) + 1 :]
    return None


def bug(prediction: str, label: Sequence[str]) -> MetricScore:
    """1 if the letter comes first, or letter or function name after "answer is:" (code_debug).

    `label` is the function's name and its letter.
    """
    (name, letter), text = label, prediction.strip()
    first = re.match("([A-D])[.:]", text)
    # A wrong letter in front is not final: "answer is:" may follow.
    if first and first.group(1) == letter:
        return MetricScore(1.0)
    text = re.sub("[Oo]ption", " ", _spaced(text, "\n`'\"-*"))
    answer = _after(re.sub(" +", " ", text), ("answer is:", "is:", "answer:"))
    if not answer:
        return MetricScore(0.0, None if first else NO_OPTION)
    return MetricScore(float(answer.startswith((letter, name))))


def option(prediction: str, label: Sequence[str]) -> MetricScore:
    """1 if the chosen option is the label (choice).

    The choice is the first letter, else the text after "answer is", else the first lone letter.
    `label` is the option's text and its letter; the text alone is right, too.
    """
    text = prediction.strip()
    if not text:
        return MetricScore(0.0, "the prediction is empty")
    if text[0] in "ABCD":
        return MetricScore(float(text[0] in label))
    if text in label:
        return MetricScore(1.0)
    text = re.sub(" +", " ", _spaced(text, "\n\"'.,?!{}"))
    answer = _after(text, ("answer is:", "answer:", "answer is", "option is"))
    if answer is not None:
        return MetricScore(float(answer.startswith(tuple(label))), None if answer else NO_OPTION)
    # As in the benchmark: "AB" counts as a letter, and matches no label.
    letter = next((item for item in text.split() if item in "ABCD"), None)
    return MetricScore(float(letter in label)) if letter else MetricScore(0.0, NO_OPTION)


def summary(prediction: str, label: Sequence[str]) -> MetricScore:
    """F-measure of rougeLsum without stemming, as the package `evaluate` computes it."""
    return google(prediction, label, "rougeLsum")


METRICS: dict[str, tuple[str, Callable[[str, Any], MetricScore]]] = {
    "passkey": ("first integer", first_integer),
    "number_string": ("first integer", first_integer),
    "kv_retrieval": ("word match", word),
    "code_run": ("last integer", last_integer),
    "code_debug": ("option", bug),
    "math_find": ("first number", first_number),
    "math_calc": ("length of the right prefix", prefix),
    "longdialogue_qa_eng": ("name", speaker),
    "longbook_choice_eng": ("option", option),
    "longbook_qa_eng": ("qa_f1", lambda text, label: best(qa_f1(text, one) for one in label)),
    "longbook_qa_chn": (
        "character F1",
        lambda text, label: best(character_f1(text, one) for one in label),
    ),
    "longbook_sum_eng": ("rougeLsum", summary),
}
