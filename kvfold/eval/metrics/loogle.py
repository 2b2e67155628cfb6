# SPDX-License-Identifier: Apache-2.0
"""Automatic metrics of LooGLE, without METEOR, BERTScore and the GPT-4 judge (downloads).

Source: bigai-nlco/LooGLE @6734382, `Evaluation/automatic_metrics.py` (Li et al., 2023,
arXiv 2311.04939, section 4.1).
"""

from __future__ import annotations

import ast
import warnings

from kvfold.eval.metrics.base import MetricScore, library
from kvfold.eval.metrics.rouge import pltrdy


def rouge_recall(prediction: str, answer: str, kind: str = "rouge-l") -> MetricScore:
    """Recall by package `rouge`; an empty prediction is scored as the word "None"."""
    return pltrdy(prediction or "None", answer, kind, "r")


def bleu(prediction: str, answer: str, order: int = 1) -> MetricScore:
    """nltk's sentence BLEU over n-grams of one `order`, 1 or 4 in the paper.

    Raises KvfoldError without the library.
    """
    weights = [float(n == order) for n in range(1, 5)]
    predicted = (prediction or "None").replace("\n", " ").split()
    if not predicted:
        return MetricScore(0.0, "the prediction is empty")
    with warnings.catch_warnings():
        # nltk warns about every text shorter than `order`.
        warnings.simplefilter("ignore", UserWarning)
        value = library("nltk.translate.bleu_score").sentence_bleu(
            [answer.replace("\n", " ").split()], predicted, weights=weights
        )
    return MetricScore(float(value))


def cloze(prediction: str, answers: dict[str, str], *, partial: bool = False) -> MetricScore:
    """Fraction of masks filled right; with `partial`, one common word is enough.

    The prediction is parsed as a Python literal, never evaluated. `weight` is the number of masks,
    as the benchmark pools masks over questions.
    """
    try:
        filled = ast.literal_eval(prediction.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        filled = None
    if not isinstance(filled, dict):
        return MetricScore(0.0, "the prediction is no dictionary", len(answers))
    right = [
        bool(set(str(filled[mask]).split()) & set(answer.split()))
        if partial
        else filled[mask] == answer
        for mask, answer in answers.items()
        if mask in filled
    ]
    return MetricScore(sum(right) / len(answers), None, len(answers))
