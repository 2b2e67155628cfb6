# SPDX-License-Identifier: Apache-2.0
"""Allocation that falls with depth (PyramidKV)."""

from __future__ import annotations

from kvfold.methods.stages.allocate.rounding import largest_remainder
from kvfold.methods.stages.allocate.uniform import uniform


def pyramid(total: int, seen: int, layers: int, window: int, beta: float) -> list[int]:
    """Sizes of the layers: an arithmetic sequence from bottom to top, plus `window` entries each.

    With `base` entries per layer besides the window, the top layer gets `base / beta` and the
    bottom one `2·base − base / beta`; the sum is exact. A total below the windows is shared
    evenly. Source: PyramidKV, arXiv 2406.02069, section 4.2.
    """
    inside = total - layers * window
    if inside < 0:
        return uniform(total, seen, layers)
    base = inside / layers
    top, bottom = base / beta, 2 * base - base / beta
    steps = max(1, layers - 1)
    shares = [bottom - (bottom - top) * i / steps for i in range(layers)] if layers > 1 else [base]
    counts = largest_remainder(shares, inside, max(0, seen - window))
    return [count + window for count in counts]


def pyramid_official(total: int, seen: int, layers: int, window: int, beta: int) -> list[int]:
    """Sizes of the layers as in the official code, whose floored step makes them exceed `total`.

    Source: Zefan-Cai/KVCache-Factory, `pyramidkv_utils.py`.
    """
    capacity = total // layers
    base = capacity - window
    if seen < capacity:
        return [seen] * layers
    if seen < 2 * base:
        return [base + window] * layers
    low = base // beta
    high = 2 * base - low
    if high >= seen - window:
        high = seen - window
        low = 2 * base - high
    step = (high - low) // max(1, layers - 1)
    return [high - i * step + window for i in range(layers)]
