# SPDX-License-Identifier: Apache-2.0
"""Search for the smallest passing budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

B = TypeVar("B")


def smallest(budgets: Sequence[B], passes: Callable[[B], bool]) -> B | None:
    """The first of ascending `budgets` that passes, by bisection; None if the last one fails.

    If passing is monotone, it is the smallest that passes. Otherwise it is one that passes while
    the next smaller one fails, or the first.
    """
    if not passes(budgets[-1]):
        return None
    failing, passing = -1, len(budgets) - 1
    while passing - failing > 1:
        middle = (failing + passing) // 2
        if passes(budgets[middle]):
            passing = middle
        else:
            failing = middle
    return budgets[passing]
