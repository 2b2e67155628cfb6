# SPDX-License-Identifier: Apache-2.0
"""Errors of reading a file whose checksums hold and whose numbers contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvfold.contexts.files.format import ContextFile
from kvfold.errors import KvfoldError

UNFIT = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)


@contextmanager
def told_as_damage(file: ContextFile) -> Iterator[None]:
    """ContextFileError for what numbers and tensors that do not fit each other raise."""
    try:
        yield
    except (KvfoldError, torch.OutOfMemoryError):
        raise
    except UNFIT as bad:
        raise file.damaged(f"its layers do not fit its header ({bad})") from bad
