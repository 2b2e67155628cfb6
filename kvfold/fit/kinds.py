# SPDX-License-Identifier: Apache-2.0
"""What `kvfold fit` fits beside the scorers of `zap`, by the method that reads it."""

from __future__ import annotations

from collections.abc import Callable

from kvfold.fit.filters import FilterFit, fit_filters

OtherFit = FilterFit
# (model, tokenizer, texts, out, *, note) → result
OTHERS: dict[str, Callable[..., OtherFit]] = {"qfilter": fit_filters}
