# SPDX-License-Identifier: Apache-2.0
"""Kinds of fit beside the scorers of `zap`, by the method or codec that reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvfold.fitted.fitting.centres import CentreFit, fit_centres
from kvfold.fitted.fitting.codec import CodecFit, fit_codec
from kvfold.fitted.fitting.curves import PUBLISHED, CurveFit, fit_curve, ranking_method
from kvfold.fitted.fitting.filters import FilterFit, fit_filters
from kvfold.fitted.fitting.heads import HeadFit, fit_heads
from kvfold.fitted.fitting.target import target_method

OtherFit = CentreFit | FilterFit | HeadFit | CurveFit | CodecFit
# (model, tokenizer, texts, out, *, note) → result
OTHERS: dict[str, Callable[..., OtherFit]] = {
    "qfilter": fit_filters,
    "triattention": fit_centres,
    "duo": fit_heads,
    "kvtc": fit_codec,
}


def other_fit(scorer: str) -> Callable[..., OtherFit] | None:
    """The fit that a name asks for, or "snapkv + curve"; None for methods that zap learns from.

    Raises KvfoldError for a curve of a method that scores nothing.
    """
    score, plus, last = (part.strip() for part in scorer.rpartition("+"))
    if last == "curve":
        score = score if plus else PUBLISHED
        ranking_method(score)
        return partial(fit_curve, score=score)
    return OTHERS.get(scorer)


def method_and_target(scorer: str) -> tuple[str, str]:
    """The method or codec that a fit is for, and what it is fitted to, as its file names them.

    Raises KvfoldError as `target_method`.
    """
    score, plus, last = (part.strip() for part in scorer.rpartition("+"))
    if last == "curve":
        return last, score if plus else PUBLISHED
    return (scorer, scorer) if scorer in OTHERS else ("zap", str(target_method(scorer)))
