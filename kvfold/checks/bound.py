# SPDX-License-Identifier: Apache-2.0
"""The bound: the smallest budget of the table whose mean loss is low with a stated confidence.

Budgets are tested in a fixed sequence, so that all together err as seldom as one alone:
Angelopoulos et al., "Learn then test", arXiv 2110.01052, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvfold.budget import Budget
from kvfold.checks.certify import unmeasured
from kvfold.checks.encoded import EncodedPrompt
from kvfold.checks.groups import bounded_groups, too_high
from kvfold.checks.measure import PromptMeasurements
from kvfold.checks.result import CheckCell, CheckLimits, GroupBound, RiskBound
from kvfold.evidence.grouped import grouped


def risk_bound(
    measured: PromptMeasurements,
    batches: Sequence[tuple[EncodedPrompt, ...]],
    cells: Sequence[CheckCell],
    limits: CheckLimits,
) -> RiskBound:
    """The bound of a method from its `cells` of the table, which are of all prompts.

    The sequence ends with the first budget that is not confirmed.
    """
    sequence = fixed_sequence(cells)
    method, found = sequence[0].method, None
    nothing = unmeasured(measured, batches)
    if limits.mean_kl >= limits.clip:
        nothing = (
            f"a tolerance of {limits.mean_kl:g} is no limit where losses end at {limits.clip:g}"
        )
    for cell in sequence:
        groups = groups_of(measured, batches, cell, limits)
        what = "the clipped mean KL"
        reason = nothing or too_high(groups, limits.mean_kl, limits.error, what, limits.clip)
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


def fixed_sequence(cells: Sequence[CheckCell]) -> list[CheckCell]:
    """Cells by budget, the largest first; parts, tokens and bytes in the order they are given in.

    Not by what was kept, which is measured on the same prompts as the losses: among budgets of
    several kinds, prompts on which one loses less by chance would bring that one forward.
    """
    budgets = [Budget.of(cell.budget) for cell in cells if cell.budget is not None]
    if not budgets:
        return list(cells)
    kinds = grouped((of.kind, (of.amount, cell)) for of, cell in zip(budgets, cells, strict=True))
    return [cell for of in kinds.values() for _, cell in sorted(of, key=lambda pair: -pair[0])]


def groups_of(
    measured: PromptMeasurements,
    batches: Sequence[tuple[EncodedPrompt, ...]],
    cell: CheckCell,
    limits: CheckLimits,
) -> dict[str, GroupBound]:
    """Bounds of all groups of prompts, each with its part of the error."""
    at = cell.method, cell.budget
    losses = (
        (prompt.group, (prompt.digest, float(np.mean(found.kl))))
        for batch in batches
        for prompt, found in zip(batch, measured.distances(batch, at), strict=True)
    )
    return bounded_groups(losses, limits.error, limits.clip)
