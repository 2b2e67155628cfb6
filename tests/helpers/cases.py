# SPDX-License-Identifier: Apache-2.0
"""Which cases of a parametrised test stand for all of them.

Two methods are of one kind if they name the same stages and needs: only the formula of a stage
differs, which the method's own test file compares with loops or released code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from functools import cache, partial
from itertools import combinations
from operator import itemgetter
from typing import Any

from kvfold import parse
from kvfold.errors import KvfoldError

EACH = 0  # as a number of cases: one of each method, and not of each kind


def _form(value: Any) -> Hashable:
    """What stays of a stage without its formula and its numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = (f.name for f in dataclasses.fields(value) if _differs(value, f))
        return type(value).__name__, *((name, _form(getattr(value, name))) for name in changed)
    if isinstance(value, frozenset):
        return frozenset(map(_form, value))
    if value is None or isinstance(value, (bool, str)):
        return value
    return callable(value) or isinstance(value, (int, float)) or type(value).__name__


def _differs(value: Any, field: dataclasses.Field[Any]) -> bool:
    return field.name not in ("method", "inexact") and getattr(value, field.name) != field.default


@cache
def kind(text: str) -> Hashable:
    """A method's kind, or the text itself if it names no method."""
    try:
        return _form(parse(text).stages())
    except KvfoldError:
        return text


def _value(value: Any, *, by_kind: bool) -> Hashable:
    if isinstance(value, str) and by_kind:
        return kind(value)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def covering(cases: Sequence[Mapping[str, Any]], number: int | None = None) -> list[int]:
    """Indices of few cases in which each parameter takes all its values, methods by kind.

    Of cases that bring as many new values, the one with most new pairs of two values is taken, so
    that the values of one parameter meet different ones of another. `number`: that many of these,
    evenly among them, or all of them if there are no more; EACH: one method stands for no other.
    """
    value = partial(_value, by_kind=number != EACH)
    values = [{(name, value(given)) for name, given in case.items()} for case in cases]
    pairs = [set(combinations(sorted(case, key=itemgetter(0)), 2)) for case in values]
    missing, met, chosen = set().union(*values), set(), []

    def new(case: int) -> tuple[int, int]:
        return len(values[case] & missing), len(pairs[case] - met)

    while missing:
        best = max(range(len(cases)), key=new)
        missing -= values[best]
        met |= pairs[best]
        chosen.append(best)
    return _evenly(sorted(chosen), number or len(chosen))


def _evenly(indices: list[int], number: int) -> list[int]:
    """`number` of the indices, from the first one on, or all if there are no more."""
    step = max(1, len(indices) / number)
    return [indices[int(i * step)] for i in range(min(number, len(indices)))]
