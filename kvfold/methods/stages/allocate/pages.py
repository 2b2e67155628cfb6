# SPDX-License-Identifier: Apache-2.0
"""Rounding of heads' numbers of entries to whole pages, with an exact sum."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush


def whole_pages(
    counts: Sequence[int],
    forced: Sequence[int],
    stored: Sequence[int],
    size: int,
    fewest: int = 0,
) -> list[int]:
    """Entries that each head keeps in pages of `size`, near its own `counts`, below 0 perhaps.

    There are ⌊Σ counts / size⌋ pages in all, and at least the `fewest`. Each head gets those that
    its count fills; the others go to the largest remainders, of equal ones to the earlier head. A
    head has pages for its `forced` entries, though the sum be larger, and no more pages than its
    `stored` entries fill. A head whose forced entries do not fit those keeps all that it stores.
    The sum is smaller where stored entries fill fewer pages. `forced, counts ≤ stored` in each
    head.
    """
    least = [-(-count // size) for count in forced]
    most = [max(all_ // size, few) for all_, few in zip(stored, least, strict=True)]
    total = max(sum(least), min(max(fewest, sum(counts) // size), sum(most)))
    pages = [max(count // size, few) for count, few in zip(counts, least, strict=True)]
    missing = total - sum(pages)
    bounds, step = (most, 1) if missing > 0 else (least, -1)
    _shift(pages, counts, bounds, size, step, abs(missing))
    return [min(each * size, all_) for each, all_ in zip(pages, stored, strict=True)]


def _shift(
    pages: list[int], counts: Sequence[int], bounds: list[int], size: int, step: int, times: int
) -> None:
    """Gives `times` pages (`step` 1) or takes them (−1), in place, and none beyond the `bounds`.

    Given to the head with the most entries outside its pages, taken from the one with the fewest.
    """
    queue = [
        (step * (size * pages[head] - count), step * head)
        for head, count in enumerate(counts)
        if pages[head] != bounds[head]
    ]
    heapify(queue)
    for _ in range(times):
        signed = heappop(queue)[1]
        head = step * signed
        pages[head] += step
        if pages[head] != bounds[head]:
            heappush(queue, (step * (size * pages[head] - counts[head]), signed))
