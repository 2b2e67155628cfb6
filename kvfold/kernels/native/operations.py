# SPDX-License-Identifier: Apache-2.0
"""Operations of this folder's C++, which torch's counters do not see."""

from __future__ import annotations

import threading


class _Done(threading.local):
    operations = 0


_done = _Done()


def note(multiply_adds: int) -> None:
    """Counts two operations per multiply-add, as torch's FlopCounterMode does."""
    _done.operations += 2 * multiply_adds


def so_far() -> int:
    """Operations of all calls by this thread: a block's are the difference between two answers."""
    return _done.operations
