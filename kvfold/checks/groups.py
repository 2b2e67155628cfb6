# SPDX-License-Identifier: Apache-2.0
"""Bounds of mean losses of groups of prompts, which share an error (Bonferroni)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real

import numpy as np

from kvfold.checks.result import EVERYTHING, GroupBound
from kvfold.errors import KvfoldError
from kvfold.evidence.bounds import least_samples, upper_bound
from kvfold.evidence.grouped import grouped

LEAST_ERROR, MOST_ERROR = 1e-9, 0.5


def checked_error(error: float) -> float:
    """The most probable error of bounds; raises KvfoldError for what is no such probability."""
    if not isinstance(error, Real) or not LEAST_ERROR <= error <= MOST_ERROR:
        raise KvfoldError(
            f"the error is {error!r}: give a probability from 1e-9 to 0.5, such as 0.1"
        )
    return error


def confidence(error: float) -> str:
    """The confidence that an error leaves, with as many digits as the least error takes."""
    return f"{1 - error:.9g}"


def bounded_groups(
    losses: Iterable[tuple[str | None, tuple[str, float]]], error: float, most: float = 1.0
) -> dict[str, GroupBound]:
    """Bounds by name of the group, from groups and their prompts' digests and losses.

    Losses are from 0 to `most`; larger ones count as that.
    """
    found = grouped((name or EVERYTHING, of) for name, of in losses)
    made = {}
    for name, of_group in sorted(found.items()):
        # Hashes give an order that no loss depends on.
        clipped = np.array([min(most, loss) for _, loss in sorted(of_group)])
        bound = most * float(upper_bound(clipped / most, error / len(found)))
        made[name] = GroupBound(prompts=len(clipped), loss=float(clipped.mean()), bound=bound)
    return made


def too_high(
    groups: Mapping[str, GroupBound], tolerance: float, error: float, what: str, most: float = 1.0
) -> str:
    """Reason why a group's mean loss is not confirmed to be within the tolerance, "" if all are.

    `what` names the loss.
    """
    for name, of in groups.items():
        if of.bound <= tolerance:
            continue
        alone = list(groups) == [EVERYTHING]
        few = too_few(of.prompts, tolerance / most, error / len(groups), None if alone else name)
        if few:
            return few
        return f"{what}{_of(None if alone else name)} may be {of.bound:.3g}, above {tolerance:g}"
    return ""


def too_few(prompts: int, tolerance: float, error: float, group: str | None) -> str:
    """Reason why so many prompts can confirm no such tolerance, "" if they may.

    The tolerance is a share of the largest loss.
    """
    least = least_samples(tolerance, error)
    if least is None:
        return f"no number of prompts confirms a tolerance of {tolerance:g}"
    if prompts < least:
        return f"{prompts} prompts{_of(group)} are too few: give at least {least}"
    return ""


def _of(group: str | None) -> str:
    return "" if group is None else f" of the group {group!r}"
