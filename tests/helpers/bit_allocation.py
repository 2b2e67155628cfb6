# SPDX-License-Identifier: Apache-2.0
"""KVTC's bits for groups of directions, by dynamic programming: what kvfold's one step is held to.

Directions are in principal order. Consecutive ones make a group of one type: float16, or integers
that each token scales by itself, with two numbers of 16 bits. Precision never rises along the
order, and what follows the last group is dropped. Source: Staniszewski and Łańcucki (arXiv
2511.01815).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

RAW = 16  # bits of a float16
OF_SCALE = 32  # bits of a token's scale and minimum


class Group(NamedTuple):
    """So many directions in so many bits each."""

    width: int
    bits: int

    @property
    def cost(self) -> int:
        """Bits of a token."""
        return self.width * self.bits + (0 if self.bits == RAW else OF_SCALE)


class Plan(NamedTuple):
    """Bits of a token, squared error of all tokens, and the groups."""

    cost: int
    error: float
    groups: tuple[Group, ...]


def rounded(part: np.ndarray, bits: int) -> np.ndarray:
    """Numbers `[tokens, width]` in `bits` each, between the ends of each token."""
    if bits == RAW:
        return part
    low, high = part.min(1, keepdims=True), part.max(1, keepdims=True)
    step = np.maximum((high - low) / (2**bits - 1), 1e-12)
    return low + step * np.round((part - low) / step)


def allocate(
    projections: np.ndarray, budget: int, widths: Sequence[int], types: Sequence[int]
) -> Plan:
    """The plan of least error for `projections [tokens, n]` within `budget` bits a token."""
    count = projections.shape[1]
    energy = np.square(projections).sum()
    # For each number of directions covered and each last type: plans that none is better than.
    fronts: dict[tuple[int, int], list[Plan]] = {(0, max(types)): [Plan(0, float(energy), ())]}
    for start in range(count):
        for last in types:
            for plan in _front(fronts.get((start, last), [])):
                for group in _groups(widths, [each for each in types if each <= last]):
                    stop = start + group.width
                    if stop > count or plan.cost + group.cost > budget:
                        continue
                    part = projections[:, start:stop]
                    wrong = np.square(part - rounded(part, group.bits)).sum()
                    error = float(plan.error - np.square(part).sum() + wrong)
                    made = Plan(plan.cost + group.cost, error, (*plan.groups, group))
                    fronts.setdefault((stop, group.bits), []).append(made)
    return min((plan for front in fronts.values() for plan in front), key=lambda plan: plan.error)


def _groups(widths: Sequence[int], types: Sequence[int]) -> Iterator[Group]:
    for width in widths:
        for bits in types:
            yield Group(width, bits)


def _front(plans: list[Plan]) -> Iterator[Plan]:
    """Those that no cheaper plan equals in error."""
    least = np.inf
    for plan in sorted(plans):
        if plan.error < least:
            least = plan.error
            yield plan
