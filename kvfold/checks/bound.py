# SPDX-License-Identifier: Apache-2.0
"""The bound: the smallest budget of the table whose mean loss is low with a stated confidence.

Budgets are tested in a fixed sequence, so that all together err as seldom as one alone:
Angelopoulos et al., "Learn then test", arXiv 2110.01052, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvfold.checks.encoded import EncodedPrompt
from kvfold.checks.measure import PromptMeasurements
from kvfold.checks.result import EVERYTHING, CheckCell, CheckLimits, GroupBound, RiskBound
from kvfold.evidence.bounds import least_samples, upper_bound
from kvfold.evidence.grouped import grouped


def risk_bound(
    measured: PromptMeasurements,
    batches: Sequence[tuple[EncodedPrompt, ...]],
    cells: Sequence[CheckCell],
    limits: CheckLimits,
) -> RiskBound:
    """The bound of a method from its `cells` of the table, which are of all prompts.

    The budget that keeps most comes first; the sequence ends with the first that is not confirmed.
    """
    sequence = sorted(cells, key=lambda cell: -cell.kept)
    method, found, reason = sequence[0].method, None, ""
    for cell in sequence:
        groups = groups_of(measured, batches, cell, limits)
        reason = too_high(groups, limits)
        if reason:
            break
        found = cell, groups
    shown, groups = (cell, groups) if found is None else found
    return RiskBound(
        method=method,
        confirmed=found is not None,
        budget=shown.budget,
        kept=shown.kept,
        reason="" if found is not None else reason,
        groups=groups,
    )


def groups_of(
    measured: PromptMeasurements,
    batches: Sequence[tuple[EncodedPrompt, ...]],
    cell: CheckCell,
    limits: CheckLimits,
) -> dict[str, GroupBound]:
    """Bounds of all groups of prompts, each with its part of the error (Bonferroni)."""
    at = cell.method, cell.budget
    # Hashes give an order that no loss depends on; batches are sorted by length.
    losses = grouped(
        (prompt.group or EVERYTHING, (prompt.digest, min(limits.clip, float(np.mean(found.kl)))))
        for batch in batches
        for prompt, found in zip(batch, measured.distances(batch, at), strict=True)
    )
    made = {}
    for name, of_group in sorted(losses.items()):
        clipped = np.array([loss for _, loss in sorted(of_group)])
        bound = limits.clip * float(upper_bound(clipped / limits.clip, limits.error / len(losses)))
        made[name] = GroupBound(prompts=len(clipped), loss=float(clipped.mean()), bound=bound)
    return made


def too_high(groups: dict[str, GroupBound], limits: CheckLimits) -> str:
    """Reason why a group's mean loss is not confirmed to be within the tolerance, "" if all are."""
    for name, of in groups.items():
        if of.bound <= limits.mean_kl:
            continue
        least = least_samples(limits.mean_kl / limits.clip, limits.error / len(groups))
        where = "" if list(groups) == [EVERYTHING] else f" of the group {name!r}"
        if least is None:
            return f"no number of prompts confirms a tolerance of {limits.mean_kl:g}"
        if of.prompts < least:
            return f"{of.prompts} prompts{where} are too few: give at least {least}"
        return f"the clipped mean KL{where} may be {of.bound:.3g}, above {limits.mean_kl:g}"
    return ""
