# SPDX-License-Identifier: Apache-2.0
"""Whole pages of each head beside the rest, the tokens of a text's last and unfilled page."""

from __future__ import annotations

import kvfold
from tests.helpers.caches import positions


def paged(spec: str, size: int) -> str:
    return f"{spec} + pages:size={size}"


def of_row(cache: kvfold.CompressedCache, row: int) -> list[list[list[int]]]:
    """Positions that a row keeps, by layer and head."""
    return [layer[row] for layer in positions(cache)]


def all_heads(cache: kvfold.CompressedCache, row: int) -> list[list[int]]:
    """Positions that a row keeps, by head, of all layers one after another."""
    return [head for layer in of_row(cache, row) for head in layer]


def rounded(
    counts: list[int], forced: list[int], size: int, rest: int, fewest: int = 1
) -> list[int]:
    """Entries in whole pages: page by page to the head that lacks most, forced ones' first.

    The `rest` stays in each head beside them, and is not among the `forced` entries.
    """
    pages = [-(-count // size) for count in forced]
    while sum(pages) < max(fewest, (sum(counts) - rest * len(counts)) // size):
        lacking = [count - size * own for count, own in zip(counts, pages, strict=True)]
        pages[lacking.index(max(lacking))] += 1
    return [each * size + rest for each in pages]


def whole_beside(heads: list[list[int]], size: int, seen: int, end: int) -> bool:
    """Whether each head keeps whole pages beside the last `seen % size` columns before `end`."""
    rest = seen % size
    newest = list(range(end - rest, end))
    return all(
        head[len(head) - rest :] == newest and (len(head) - rest) % size == 0 for head in heads
    )


def filled(
    mine: list[list[int]],
    theirs: list[list[int]],
    size: int,
    seen: int,
    end: int = 64,
    forced: int = 0,
) -> bool:
    """Whether heads keep as many pages as `theirs`, kept without pages, fill beside the rest.

    Each has room for its `forced` entries that are not among the rest.
    """
    rest = seen % size * len(mine)
    pages = max(-(-forced // size) * len(mine), (sum(map(len, theirs)) - rest) // size)
    whole = whole_beside(mine, size, seen, end)
    return whole and sum(map(len, mine)) == pages * size + rest
