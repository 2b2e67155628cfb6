# SPDX-License-Identifier: Apache-2.0
"""What `kvfold fit` fits beside the scorers of `zap`, by the method that reads it."""

from __future__ import annotations

from collections.abc import Callable

from kvfold.fit.filters import FilterFit, fit_filters
from kvfold.fit.heads import HeadFit, fit_heads

OtherFit = FilterFit | HeadFit
# (model, tokenizer, texts, out, *, note) → result
OTHERS: dict[str, Callable[..., OtherFit]] = {"qfilter": fit_filters, "duo": fit_heads}
