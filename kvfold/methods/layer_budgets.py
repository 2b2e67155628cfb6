# SPDX-License-Identifier: Apache-2.0
"""A budget for each layer, as a method with sizes and one mean budget."""

from __future__ import annotations

from collections.abc import Sequence

from kvfold.budget import Budget
from kvfold.errors import BudgetError, IllegalComposition
from kvfold.methods.base import Method, parse
from kvfold.methods.sizes import Sizes
from kvfold.methods.stages.allocate.parts import LayerParts

One = Budget | float | str
Given = One | Sequence[One] | None  # a budget as a cache takes it


def layerwise(method: Method, budget: Given) -> tuple[Method, One | None]:
    """The method and budget of a cache that was given `[0.2, 0.3, …]` or "0.2,0.3,…".

    Each number is the budget of one compressed layer, all of them ratios or all of them tokens;
    the cache's own budget is their mean, rounded up. What must stay in a layer whose ratio has no
    room for it takes that of other layers. One budget stays as it is.

    Raises BudgetError for a mixture, for bytes, and for fewer tokens than the method always keeps;
    IllegalComposition for a method that sizes its layers by itself, or without a budget.
    """
    if isinstance(budget, str) and "," in budget:
        budget, whole = budget.strip().removeprefix("[").removesuffix("]").split(","), budget
        if any(each.strip() == "0" for each in budget):
            raise BudgetError(
                f"{whole!r} is a list, of a budget for each layer, and none is 0: write a number "
                "with a point, such as 0.2"
            )
    if getattr(budget, "ndim", 0) == 1:  # of numpy or torch
        budget = list(budget)  # type: ignore[arg-type]
    if not isinstance(budget, list | tuple):
        return method, budget  # type: ignore[return-value]  # what is no budget is refused later
    made = [Budget.of(each) for each in budget]
    kinds = {each.kind for each in made}
    if len(kinds) != 1 or "bytes" in kinds:
        raise BudgetError(
            "budgets of layers are all ratios, [0.2, 0.3, …], or all numbers of tokens, not "
            f"{', '.join(map(str, made)) or 'none'}"
        )
    if not method.takes_budget:
        raise BudgetError(f"{method} takes no budget: leave it out")
    amounts = tuple(each.amount for each in made)
    least = method.stages().forced.least
    if kinds == {"tokens"} and min(amounts) < least:
        raise BudgetError(
            f"{method} always keeps {least} entries per KV head, and the budget of layer "
            f"{amounts.index(min(amounts))} is {int(min(amounts))}: raise it to at least {least}"
        )
    try:
        sized = parse(f"{method} + {Sizes(parts=amounts)}")
        sized.stages()
    except IllegalComposition as problem:
        raise IllegalComposition(
            f"{method} sizes its layers by itself, so give it one budget ({problem})"
        ) from problem
    return sized, Budget(made[0].kind, LayerParts(amounts).mean)
