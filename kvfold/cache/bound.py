# SPDX-License-Identifier: Apache-2.0
"""`max_cache_tokens`: a method, its rounds and its budget, so that an answer of any length fits."""

from __future__ import annotations

from kvfold.budget import Budget
from kvfold.errors import BudgetError, IllegalComposition, KvfoldError
from kvfold.methods.base import Method, Stages
from kvfold.methods.every import Every, in_rounds
from kvfold.methods.layer_budgets import Given, One, layerwise
from kvfold.methods.stages.when import AtEnd


def bounded(
    method: Method, budget: Given, every: int | None, most: int | None
) -> tuple[Method, One | None]:
    """The method and budget of a cache that holds at most `most` entries while it answers.

    Entries are counted per row, layer and KV head on average, as a budget's are, and the token of
    the running step is one of them: a budget and the tokens between two evictions are at most
    `most`. A method that appends gets rounds: of `every` tokens; else of 128, or fewer where the
    budget, or without one half of `most`, leaves no room for them. A missing budget is what the
    rounds leave. Without `most` the method is `in_rounds`, and the budget as given. Budgets of
    layers are the method's first: see `layerwise`.

    Raises KvfoldError for a method that cannot be bounded, and BudgetError for a budget or rounds
    that do not fit.
    """
    method, budget = layerwise(method, budget)
    if most is None:
        return in_rounds(method, every), budget
    if type(most) is not int or most < 2:
        raise KvfoldError(f"max_cache_tokens is at least 2 entries, not {most!r}")
    size = None if budget is None else Budget.of(budget)
    if size is not None and size.kind != "tokens":
        raise BudgetError(
            f"a budget of {size} is not a number of entries beforehand: beside max_cache_tokens "
            "give one in tokens, or none"
        )
    if not method.takes_budget:
        raise KvfoldError(
            f"{method} takes no budget, and keeps as much as a text needs: max_cache_tokens goes "
            "with a method that has one"
        )
    kept = None if size is None else int(size.amount)
    if every is None and isinstance(method.stages().when, AtEnd):
        every = max(1, min(Every.interval, most // 2 if kept is None else most - kept))
    method = _evicting(method, every, most)
    return method, _fitting(method, method.stages(), kept, most)


def _evicting(method: Method, every: int | None, most: int) -> Method:
    """The method, in rounds of `every` tokens if any; KvfoldError if no eviction bounds it."""
    cannot = f"{method} cannot keep to max_cache_tokens={most}"
    try:
        method = in_rounds(method, every)
    except IllegalComposition as problem:
        raise IllegalComposition(f"{cannot}: {problem}") from None
    stages = method.stages()
    if stages.keeps_prompt:
        raise KvfoldError(f"{cannot} beside a prompt of any length: choose prompt=counted")
    if stages.encode is not None and stages.encode.recalls:
        raise KvfoldError(f"{cannot}: recall keeps every entry, cold; leave max_cache_tokens out")
    if stages.inexact:
        raise KvfoldError(f"{cannot}, nor to a budget ({stages.inexact}): choose another method")
    return method


def _fitting(method: Method, stages: Stages, kept: int | None, most: int) -> Budget:
    """The budget of `kept` tokens, or of what evictions leave; BudgetError for one too large."""
    between = stages.interval or 1  # tokens from one eviction to the next
    if kept is None and most - between < max(1, stages.forced.least):
        raise BudgetError(
            f"max_cache_tokens={most} leaves {max(0, most - between)} entries between evictions "
            f"after every {between} tokens, and {method} always keeps {stages.forced.least}: raise "
            "it, or lower every="
        )
    if kept is not None and kept + between > most:
        raise BudgetError(
            f"a budget of {kept} grows to {kept + between} entries until the next eviction, "
            f"max_cache_tokens is {most}: lower the budget or every="
        )
    return Budget.tokens(most - between if kept is None else kept)
