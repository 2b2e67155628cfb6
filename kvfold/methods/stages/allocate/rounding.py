# SPDX-License-Identifier: Apache-2.0
"""Rounding of real-valued shares to integers with an exact sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

ROUNDING = 1e-9  # added before rounding down, so that whole numbers survive float errors
UNLIMITED = 2**31 - 1  # size of a layer that keeps everything, while decoding too


def largest_remainder(shares: Sequence[float], total: int, most: int | None = None) -> list[int]:
    """Integers near `shares` that add up to `total`; ties go to the earlier index.

    No integer exceeds `most`: the excess goes to the first indices with room, and is lost only if
    none has room.
    """
    counts = [math.floor(share + ROUNDING) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for i in by_remainder[: max(0, total - sum(counts))]:
        counts[i] += 1
    return counts if most is None else _clamp(counts, most)


def raised(counts: Sequence[int], least: int, whole: int) -> list[int]:
    """Counts of the same sum, with none below `least` as far as the others can give.

    Counts give in proportion to their surplus over `least`; those of `whole` or more give nothing.
    """
    giving = [i for i, count in enumerate(counts) if least < count < whole]
    above = sum(counts[i] - least for i in giving)
    given = min(above, sum(max(0, least - count) for count in counts))
    if not given:
        return list(counts)
    result, left = list(counts), above - given
    shares = [(counts[i] - least) * left / above for i in giving]
    for i, share in zip(giving, largest_remainder(shares, left), strict=True):
        result[i] = least + share
    for i, count in enumerate(counts):
        more = min(given, max(0, least - count))
        result[i] += more
        given -= more
    return result


def _clamp(counts: list[int], most: int) -> list[int]:
    overflow = sum(max(0, count - most) for count in counts)
    counts = [min(count, most) for count in counts]
    for i in range(len(counts)):
        given = min(overflow, most - counts[i])
        counts[i] += given
        overflow -= given
    return counts
