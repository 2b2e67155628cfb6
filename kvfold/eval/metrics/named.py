# SPDX-License-Identifier: Apache-2.0
"""Metrics by name for user data: a prediction against all right answers."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

from kvfold.eval.metrics.base import MetricScore, best
from kvfold.eval.metrics.longbench import code_sim
from kvfold.eval.metrics.maths import equivalent, gsm8k_flexible
from kvfold.eval.metrics.overlap import qa_f1, qa_f1_zh, words
from kvfold.eval.metrics.rouge import in_any_script
from kvfold.eval.metrics.ruler import string_match_all, string_match_part
from kvfold.eval.metrics.words import ascii_digits, folded, spaced, without_punctuation

Named = Callable[[str, Sequence[str]], MetricScore]

DEFAULT = "contains"

_NO_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))


def _exact(prediction: str, answer: str) -> MetricScore:
    if words(answer):
        return MetricScore(float(words(prediction) == words(answer)))
    return MetricScore(float(_bare(prediction) == _bare(answer)))


def _bare(text: str) -> list[str]:
    """Words of a text that may be an article alone, in brackets or before a full stop."""
    return text.translate(_NO_PUNCTUATION).split() or text.split()


def _f1(prediction: str, answer: str) -> MetricScore:
    # Such as the answer "A" of a multiple choice, which SQuAD leaves out as an article.
    return qa_f1(prediction, answer) if words(answer) else _exact(prediction, answer)


def _after(clean: Callable[[str], str], metric: Named) -> Named:
    """The metric of cleaned texts; the benchmarks' own metrics clean ASCII texts alone."""
    return lambda prediction, answers: metric(clean(prediction), [*map(clean, answers)])


def _best(metric: Callable[[str, str], MetricScore]) -> Named:
    return lambda prediction, answers: best(metric(prediction, answer) for answer in answers)


NAMED: dict[str, Named] = {
    "contains": _after(folded, string_match_part),
    "contains_all": _after(folded, string_match_all),
    "exact": _after(without_punctuation, _best(_exact)),
    "f1": _after(lambda text: spaced(without_punctuation(text)), _best(_f1)),
    "f1_zh": _after(folded, _best(qa_f1_zh)),
    "rouge_l": lambda prediction, answers: in_any_script(prediction, answers, "rougeL"),
    "rouge_lsum": lambda prediction, answers: in_any_script(prediction, answers, "rougeLsum"),
    "number": _after(ascii_digits, _best(gsm8k_flexible)),
    "math": _after(ascii_digits, _best(equivalent)),
    "code": _best(code_sim),
}
# Meaning of each metric, in one line.
MEANS = {
    "contains": "any of the answers is in the prediction, case ignored",
    "contains_all": "share of the answers that are in the prediction, case ignored",
    "exact": "equal words, without case, punctuation and articles (SQuAD's exact match)",
    "f1": "overlap of words, of characters where a script has no spaces (SQuAD's F1)",
    "f1_zh": "overlap of Chinese words (LongBench); f1 for other languages",
    "rouge_l": "ROUGE-L over words of any script (rouge-score)",
    "rouge_lsum": "the same over lines, for summaries (rouge-score)",
    "number": "the last number is the answer (GSM8K)",
    "math": "the last \\boxed{} equals the answer as an expression (math-verify)",
    "code": "similarity of the first line of code (LongBench)",
}
