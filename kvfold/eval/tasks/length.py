# SPDX-License-Identifier: Apache-2.0
"""How much haystack fits: the search every generated task uses, with a floor and an end."""

from __future__ import annotations

from collections.abc import Callable

from kvfold.errors import KvfoldError


def largest(
    size: Callable[[int], int], limit: int, least: int, most: int | None = None, what: str = "it"
) -> int:
    """The largest n from `least` to `most` whose `size(n)` found is at most `limit` tokens.

    Sizes are taken to grow about evenly, so few are computed. Raises KvfoldError where even the
    least does not fit: RULER's own search goes on for ever there.
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
