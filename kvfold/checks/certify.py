# SPDX-License-Identifier: Apache-2.0
"""The certificate: the smallest kept part within the limits, confirmed on held-out prompts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvfold.checks.encoded import EncodedPrompt
from kvfold.checks.measure import PromptMeasurements
from kvfold.checks.reading import MethodAtBudget
from kvfold.checks.result import Certificate, CheckCell, CheckLimits
from kvfold.checks.summary import cell, lengths
from kvfold.errors import BudgetError
from kvfold.methods.base import Method

# Kept parts that are searched, from 0.05 to 0.9: more than that saves nothing worth a risk.
PARTS = tuple(f"{number / 40:.3f}".rstrip("0") for number in range(2, 37))

LEAST_SEARCHED = 2
B = TypeVar("B")


def halves(
    prompts: Sequence[EncodedPrompt], seed: int
) -> tuple[list[EncodedPrompt], list[EncodedPrompt]]:
    """Two random halves, the held-out one second and not smaller."""
    shuffled = list(prompts)
    random.Random(seed).shuffle(shuffled)
    return shuffled[: len(shuffled) // 2], shuffled[len(shuffled) // 2 :]


def certificate(
    measured: PromptMeasurements,
    search: Sequence[tuple[EncodedPrompt, ...]],
    held_out: Sequence[tuple[EncodedPrompt, ...]],
    method: Method,
    limits: CheckLimits,
) -> Certificate:
    """The certificate of a method, or the reason why it gets none, from two halves in batches.

    On one half of the prompts the upper ends of the intervals must be within the limits, so that
    the other half, on which the values themselves must be, confirms it unless chance is against it.
    """
    parts: Sequence[str | None] = PARTS if method.takes_budget else (None,)
    candidates = [(str(method), part) for part in parts]
    if why := too_little(measured, search, held_out):
        return _made(candidates[-1], why, limits, None)
    cells: dict[MethodAtBudget, CheckCell] = {}

    def passes(at: MethodAtBudget) -> bool:
        try:
            cells[at] = cell(measured, search, at)
        except BudgetError:
            return False
        return not too_far(cells[at], limits, upper=True)

    at = smallest(candidates, passes)
    if at is None:
        largest = cells.get(candidates[-1])
        why = too_far(largest, limits, upper=True) if largest else "the budget is too small"
        kept = f"{why}, at {parts[-1]} kept" if parts[-1] else why
        return _made(candidates[-1], f"on the searched prompts, {kept}", limits, largest)
    confirmed = cell(measured, held_out, at)
    confirmed = confirmed.model_copy(update={"lengths": lengths(measured, held_out, at)})
    why = too_far(confirmed, limits) or length_off(confirmed, limits)
    reason = f"on the held-out prompts, {why}" if why else ""
    return _made(at, reason, limits, cells[at], confirmed)


def smallest(budgets: Sequence[B], passes: Callable[[B], bool]) -> B | None:
    """The first of ascending `budgets` that passes, by bisection; None if the last one fails.

    If passing is monotone, it is the smallest that passes. Otherwise it is one that passes while
    the next smaller one fails, or the first.
    """
    if not passes(budgets[-1]):
        return None
    failing, passing = -1, len(budgets) - 1
    while passing - failing > 1:
        middle = (failing + passing) // 2
        if passes(budgets[middle]):
            passing = middle
        else:
            failing = middle
    return budgets[passing]


def too_little(
    measured: PromptMeasurements,
    search: Sequence[tuple[EncodedPrompt, ...]],
    held_out: Sequence[tuple[EncodedPrompt, ...]],
) -> str:
    """Reason why prompts and their answers can certify nothing, "" if they can."""
    if sum(map(len, search)) < LEAST_SEARCHED:
        return "one searched prompt has no interval: give at least four prompts"
    return unmeasured(measured, search) or unmeasured(measured, held_out)


def unmeasured(measured: PromptMeasurements, batches: Sequence[tuple[EncodedPrompt, ...]]) -> str:
    """Reason why answers to these prompts measure nothing, "" if they do."""
    pairs = [pair for batch in batches for pair in zip(batch, measured.forced(batch), strict=True)]
    # The first token after a prompt compressed as a whole is the full cache's.
    read = sum(len(of.forced or ()) - (prompt.context is None) for prompt, of in pairs)
    if read < len(pairs):
        return f"the full cache's answers to {len(pairs)} prompts are too short to measure"
    return ""


def too_far(of: CheckCell, limits: CheckLimits, upper: bool = False) -> str:
    """Reason why a cell's KL is too high, "" if it is not; `upper`: by its interval's end."""
    for estimate, most, what in (
        (of.kl, limits.mean_kl, "the mean KL"),
        (of.kl_p99, limits.p99_kl, "the 99th percentile of the KL"),
    ):
        if not estimate.value <= most:
            return f"{what} is {estimate.value:.3g}, above {most:g}"
        if upper and not estimate.high <= most:
            return f"{what} may be {estimate.high:.3g}, above {most:g}"
    return ""


def length_off(of: CheckCell, limits: CheckLimits) -> str:
    """Reason why a cell's answers are too long or too short, "" if they are not."""
    if of.lengths is None:
        return ""
    ratio = of.lengths.ratio.value
    if limits.shortest <= ratio <= limits.longest:
        return ""
    return (
        f"answers are {ratio:.2f} times as long, outside of {limits.shortest:g} to "
        f"{limits.longest:g}"
    )


def _made(
    at: MethodAtBudget,
    reason: str,
    limits: CheckLimits,
    found: CheckCell | None,
    held_out: CheckCell | None = None,
) -> Certificate:
    return Certificate(
        method=at[0],
        certified=not reason,
        budget=at[1],
        reason=reason,
        limits=limits,
        found=found,
        held_out=held_out,
    )
