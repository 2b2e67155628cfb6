# SPDX-License-Identifier: Apache-2.0
"""Exceptions of kvfold. Every message says what is wrong and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Self


class KvfoldError(ValueError):
    """Base class of all errors that kvfold raises for bad input or an unsupported setup."""


class BudgetError(KvfoldError):
    """A budget that is not positive, malformed, or smaller than the forced entries."""


class UnsupportedModel(KvfoldError):
    """A model that kvfold would compute wrongly, and therefore refuses."""


class IllegalComposition(KvfoldError):
    """Methods or stages that cannot be combined."""


class ScorerFileError(KvfoldError):
    """A file of a fitted scorer that is damaged, or was fitted for another model."""


class CodecRefusal(KvfoldError):
    """Entries that a codec of context files cannot hold; the codec "zstd" holds all."""


class ContextFileError(KvfoldError):
    """A context file that is damaged, or was made with another model, method or version."""

    @classmethod
    def damaged(cls, path: Path, how: str) -> Self:
        """The error for a damaged file; `how` says what was found."""
        return cls(f"{path} is damaged, {how}: take another copy, or compress the document again")
