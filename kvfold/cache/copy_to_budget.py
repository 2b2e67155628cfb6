# SPDX-License-Identifier: Apache-2.0
"""Copies of a cache whose first prefill is open, ended by other budgets or other methods."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from kvfold.cache import setup
from kvfold.cache.bound import bounded
from kvfold.cache.model_binding import UNMOVED
from kvfold.cache.parts import CacheParts
from kvfold.cache.plan import checked_budget
from kvfold.errors import KvfoldError
from kvfold.fitted.fits import Fits
from kvfold.methods.base import Method, Stages
from kvfold.methods.layer_budgets import Given
from kvfold.observers.last_queries import window_of
from kvfold.observers.references import ReferenceQueries, ReferencesNeed

C = TypeVar("C", bound=CacheParts)

T = TypeVar("T")


def take_over(cache: C, budget: Given, method: Method) -> C:
    """A copy of `cache` whose prefill has ended, compressed by `method`.

    Raises KvfoldError as `CompressedCache.to_budget`.
    """
    if not cache.phase.reading or any(state.evictions for state in cache.states):
        raise KvfoldError("a cache takes another budget only while its first turn is read")
    method, budget = bounded(method, budget, None, cache.max_cache_tokens)
    if not reads_for(cache.method, method):
        raise KvfoldError(
            f"{method} observes other data than {cache.method} while a text is read: "
            "let it read itself"
        )
    fits = Fits.of(method.stages(), cache.states[0].plan.rotation.model)
    stages = setup.stages_of(method, cache.protect, cache.ranks, fits)
    made = checked_budget(method, budget, stages.forced.least)
    plans = [replace(state.plan, budget=made).by(stages) for state in cache.states]
    if stages.positions != "original":
        ids = cache.phase.history.complete(cache.get_seq_length())
        cache.binding.check_images(ids, UNMOVED)
    other = copy.deepcopy(cache, _left_out(cache, stages))
    other.phase.read_for(stages.needs)
    other.take(method=method, budget=made, fits=fits)
    for state, plan in zip(other.states, plans, strict=True):
        fitted = fits.of_layer(plan.layer, plan.ranks.own_heads)
        state.adopt(plan, state.observers.adopted(stages.needs, fitted, stages.interval))
    with other.reading():
        pass
    return other


def _left_out(cache: CacheParts, stages: Stages) -> dict[int, ReferenceQueries]:
    """By `id`, what a copy has in place of reference queries that its method does not need.

    They may be larger than the entries.
    """
    if ReferencesNeed in stages.needs or ReferencesNeed not in cache.states[0].needs:
        return {}
    held = (state.observers[ReferencesNeed] for state in cache.states)
    return {id(each): each.fresh() for each in held}


def reads_for(reader: Method, method: Method) -> bool:
    """True if a prefill by `reader` observes what `method` needs, before either compresses."""
    read, wanted = reader.stages(), method.stages()
    needs = wanted.needs
    observed, wanted_too = read.needs.while_reading, needs.while_reading
    if ReferencesNeed not in needs:  # queries that were noted beside all else change nothing
        observed = read.needs.without(ReferencesNeed).while_reading
    alike = observed == wanted_too
    pruned = read.token_pruning is not None or wanted.token_pruning is not None
    fewer = window_of(needs) <= window_of(read.needs)
    return reader == method or (alike and not pruned and fewer)


def observing_alike(items: Iterable[T], method: Callable[[T], Method]) -> list[list[T]]:
    """Items in groups that one reading serves: the one by the `method` of the group's first item.

    Groups are in the order of their items.
    """
    found = list(items)
    methods = [method(item) for item in found]
    groups: list[list[int]] = []
    for index in sorted(range(len(found)), key=lambda index: _least_noted(methods[index])):
        for group in groups:
            if reads_for(methods[group[0]], methods[index]):
                group.append(index)
                break
        else:
            groups.append([index])
    return [[found[index] for index in group] for group in sorted(groups, key=min)]


def _least_noted(method: Method) -> tuple[bool, int]:
    """Orders methods that read for others before those: by reference queries, by the window."""
    needs = method.stages().needs
    return ReferencesNeed not in needs, -window_of(needs)
