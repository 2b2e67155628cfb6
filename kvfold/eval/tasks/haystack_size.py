# SPDX-License-Identifier: Apache-2.0
"""Search for the largest haystack that fits into a length, used by all generated tasks."""

from __future__ import annotations

from collections.abc import Callable

from kvfold.errors import KvfoldError


def largest_haystack(
    size: Callable[[int], int], limit: int, least: int, most: int | None = None, what: str = "it"
) -> int:
    """The largest n found from `least` to `most` with `size(n)` at most `limit` tokens.

    Interpolation search: it assumes that sizes grow about linearly, so few are computed. `what` is
    named in the error. Raises KvfoldError if `least` does not fit; RULER's own search never ends
    there.
    """
    low, used = least, size(least)
    if used > limit:
        raise KvfoldError(f"{limit} tokens cannot hold {what}, which takes at least {used}")
    high: int | None = None if most is None else most + 1
    over: int | None = None
    while high is None or high - low > 1:
        if high is None or over is None:
            guess = low + max(1, (limit - used) * low // max(used, 1))
        else:
            guess = low + (high - low) * (limit - used) // (over - used)
        if high is not None:
            guess = min(max(guess, low + 1), high - 1)
        tokens = size(guess)
        if tokens <= limit:
            low, used = guess, tokens
        else:
            high, over = guess, tokens
    return low
