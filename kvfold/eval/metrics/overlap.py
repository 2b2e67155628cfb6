# SPDX-License-Identifier: Apache-2.0
"""F1 over words or characters, as in the question-answering benchmarks, English and Chinese.

Source: THUDM/LongBench `LongBench/metrics.py`, OpenBMB/InfiniteBench `src/compute_scores.py`
(both after the SQuAD evaluation script).
"""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvfold.eval.metrics.base import MetricScore, library

CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】"
    "〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_ASCII = str.maketrans("", "", string.punctuation)
_BOTH = str.maketrans("", "", string.punctuation + CHINESE_PUNCTUATION)


def words(text: str) -> list[str]:
    """Lower-cased words without ASCII punctuation and articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_ASCII)).split()


def characters(text: str) -> str:
    """Lower-cased text without white space, ASCII and Chinese punctuation."""
    return "".join(text.lower().translate(_BOTH).split())


def f1(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over bags of tokens."""
    same = sum((Counter(predicted) & Counter(expected)).values())
    if not same:
        return 0.0
    precision, recall = same / len(predicted), same / len(expected)
    return 2 * precision * recall / (precision + recall)


def qa_f1(prediction: str, answer: str) -> MetricScore:
    """F1 over English words."""
    return MetricScore(f1(words(prediction), words(answer)))


def qa_f1_zh(prediction: str, answer: str) -> MetricScore:
    """F1 over jieba's segments, cleaned by `characters`, empty ones dropped (LongBench)."""

    def tokens(text: str) -> list[str]:
        return [clean for token in segments(text) if (clean := characters(token))]

    return MetricScore(f1(tokens(prediction), tokens(answer)))


def character_f1(prediction: str, answer: str) -> MetricScore:
    """F1 over characters (InfiniteBench's Zh.QA)."""
    return MetricScore(f1(characters(prediction), characters(answer)))


def segments(text: str) -> list[str]:
    """Words of a Chinese text by jieba's default mode; raises KvfoldError without jieba."""
    return list(_jieba().cut(text, cut_all=False))


@functools.cache
def _jieba() -> Any:
    jieba = library("jieba")
    # By default jieba logs each load of its dictionary.
    jieba.setLogLevel("ERROR")
    return jieba
