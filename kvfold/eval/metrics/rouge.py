# SPDX-License-Identifier: Apache-2.0
"""The two ROUGE packages in use, which differ by up to a factor of three on the same texts.

`pltrdy` is the package `rouge`, used by LongBench and LooGLE: its ROUGE-L is the union of longest
common subsequences over sets of unique words, sentences split on "." only. `google` is the
package `rouge-score`, used by InfiniteBench, SCBench and the needle pictures. It splits texts into
words of a-z and 0-9; `in_any_script` has its numbers over words of any script.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvfold.eval.metrics.base import MetricScore, library
from kvfold.eval.metrics.overlap import segments
from kvfold.eval.metrics.words import words


def pltrdy(prediction: str, reference: str, kind: str = "rouge-l", part: str = "f") -> MetricScore:
    """ROUGE by package `rouge` 1.0.1: `kind` rouge-1, rouge-2 or rouge-l; `part` f, p or r.

    If a text is empty, or the library fails (a sentence of about a thousand words overflows its
    recursion), the value is 0 as in LongBench, and `failed` is the reason. Raises KvfoldError
    without the library.
    """
    scorer = library("rouge").Rouge(metrics=[kind])
    for name, text in (("prediction", prediction), ("reference", reference)):
        if not text.replace(".", " ").split():
            return MetricScore(0.0, f"rouge: the {name} is empty")
    # A fresh stack: the recursion limit must not depend on the caller's depth.
    with ThreadPoolExecutor(1) as stack:
        running = stack.submit(scorer.get_scores, [prediction], [reference], avg=True)
        try:
            return MetricScore(float(running.result()[kind][part]))
        except (ValueError, RecursionError) as error:
            return MetricScore(0.0, f"rouge: {type(error).__name__}: {error}")


def pltrdy_zh(prediction: str, reference: str) -> MetricScore:
    """LongBench's `rouge_zh`: `pltrdy` over jieba's segments, joined by spaces."""
    return pltrdy(" ".join(segments(prediction)), " ".join(segments(reference)))


def google(prediction: str, references: Sequence[str], kind: str) -> MetricScore:
    """F-measure by package `rouge-score` without stemming, the best over references.

    `kind` is rouge1, rouge2, rougeL or rougeLsum (which splits sentences on line breaks). Raises
    KvfoldError without the library.
    """
    return MetricScore(float(_google(kind).score_multi(references, prediction)[kind].fmeasure))


def in_any_script(prediction: str, references: Sequence[str], kind: str) -> MetricScore:
    """As `google`, over words of any script: the same for texts in ASCII."""
    scorer = _google(kind, _AnyScript())
    return MetricScore(float(scorer.score_multi(references, prediction)[kind].fmeasure))


@dataclass(frozen=True)
class _AnyScript:
    """A tokenizer of package `rouge-score`."""

    def tokenize(self, text: str) -> list[str]:
        return words(text)


@functools.cache
def _google(kind: str, tokenizer: _AnyScript | None = None) -> Any:
    scorers = library("rouge_score.rouge_scorer")
    return scorers.RougeScorer([kind], use_stemmer=False, tokenizer=tokenizer)
