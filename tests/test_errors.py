# SPDX-License-Identifier: Apache-2.0
"""Errors of the package are value errors."""

from __future__ import annotations

import kvfold
from kvfold import BudgetError, IllegalComposition, KvfoldError, UnsupportedModel


def test_every_error_is_a_value_error():
    for kind in (BudgetError, UnsupportedModel, IllegalComposition, kvfold.ContextFileError):
        assert issubclass(kind, KvfoldError) and issubclass(kind, ValueError)
