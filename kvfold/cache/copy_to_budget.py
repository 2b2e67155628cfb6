# SPDX-License-Identifier: Apache-2.0
"""Copies of a cache whose first prefill is open, ended by other budgets or other methods."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from kvfold.cache import setup
from kvfold.cache.bound import bounded
from kvfold.cache.model_binding import UNMOVED
from kvfold.cache.parts import CacheParts
from kvfold.cache.plan import checked_budget
from kvfold.errors import IllegalComposition, KvfoldError
from kvfold.fitted.fits import Fits
from kvfold.methods.base import Method, Stages
from kvfold.methods.layer_budgets import Given
from kvfold.observers.base import Need, Needs
from kvfold.observers.last_queries import LastQueries, window_of
from kvfold.observers.reconstruction import ContextReconstruction
from kvfold.observers.references import ReferenceQueries, ReferencesNeed, repeats_references

C = TypeVar("C", bound=CacheParts)

T = TypeVar("T")


def take_over(cache: C, budget: Given, method: Method) -> C:
    """A copy of `cache` whose prefill has ended, compressed by `method`.

    Raises KvfoldError as `CompressedCache.to_budget`.
    """
    if not reads_for(cache.method, method):
        raise KvfoldError(
            f"{method} observes other data than {cache.method} while a text is read: "
            "let it read itself"
        )
    other = copied_for(cache, budget, method)
    with other.reading():
        pass
    return other


def copied_for(cache: C, budget: Given, method: Method) -> C:
    """A copy of `cache` whose open prefill goes on by `method`, which may repeat the text next.

    What `method` needs of the text's own forwards must have been observed. Raises KvfoldError as
    `CompressedCache.to_budget`.
    """
    if not cache.phase.reading or any(state.evictions for state in cache.states):
        raise KvfoldError("a cache takes another budget only while its first turn is read")
    method, budget = bounded(method, budget, None, cache.max_cache_tokens)
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
    pruned = read.token_pruning is not None or wanted.token_pruning is not None
    return reader == method or (not pruned and _observes(read.needs, wanted.needs))


def _observes(read: Needs, wanted: Needs) -> bool:
    """True if observations of the needs `read` are those of `wanted`, and maybe others."""
    noted = set(wanted.while_reading) <= set(read.while_reading)
    return noted and _bound(read) == _bound(wanted) and window_of(wanted) <= window_of(read)


def _bound(needs: Needs) -> list[Need[Any]]:
    """Needs that change the reading for all: a repetition of the text, logits of all its tokens."""
    repeats = ContextReconstruction
    return [each for each in needs.observed if isinstance(each, repeats) or each.log() is not None]


def observing_alike(items: Iterable[T], method: Callable[[T], Method]) -> list[list[T]]:
    """Items in groups that a reading by the `method` of the group's first item serves.

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


def _least_noted(method: Method) -> tuple[int, int]:
    """Orders methods that read for others before those: by what they note, by the window."""
    needs = method.stages().needs
    return -len(needs.while_reading), -window_of(needs)


def of_forwards(needs: Needs) -> Needs:
    """What a reading must observe before the text is repeated, if it is."""
    later: list[type[Need[Any]]] = [ContextReconstruction]
    if repeats_references(needs):
        later.append(ReferencesNeed)
    read = (each for each in needs.while_reading if type(each) not in later)
    return Needs(*read, needs.get(LastQueries))


def reading_together(
    items: Iterable[T], method: Callable[[T], Method]
) -> list[tuple[Needs, list[T]]]:
    """Items in groups that one reading serves, each with what that reading observes.

    Groups are in the order of their first items. Repetitions of the text are left out.
    """
    groups: list[tuple[Needs, list[T]]] = []
    for item in items:
        needs = of_forwards(method(item).stages().needs)
        for place, (observed, group) in enumerate(groups):
            both = _joined(observed, needs)
            if both is not None:
                groups[place] = both, [*group, item]
                break
        else:
            groups.append((needs, [item]))
    return groups


def _joined(one: Needs, other: Needs) -> Needs | None:
    """What serves both; None if one reading cannot."""
    if _bound(one) != _bound(other):
        return None
    try:
        return one.joined(other)
    except IllegalComposition:
        return None
