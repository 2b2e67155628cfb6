# SPDX-License-Identifier: Apache-2.0
"""`Method`: a frozen dataclass of options that names its stages.

Values of options are checked against their kinds, read from texts, and written as texts.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import os
import re
import sys
import typing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary

import torch

from kvfold.errors import KvfoldError
from kvfold.fitted.numbers import FileName
from kvfold.methods.stages.base import Stages

# Largest options of methods: an int32 token count, a float32 score
LARGEST = {int: 2**31 - 1, float: torch.finfo(torch.float32).max}
IN_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    FileName: "the name of a file",
}
# Characters of a file name that a method's text reads otherwise: between methods and options, white
# space around a value, and a percent sign that looks like an escape
MARKS = re.compile(r"[+,]|\A\s+|\s+\Z|%(?=[0-9A-Fa-f]{2})")
# What is given beside a method, by this name and by other libraries'
BUDGETS = ("budget", "ratio", "compression_ratio")
TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
# Kinds of the classes that were asked for: resolving hints takes longer than all else here
_KINDS: WeakKeyDictionary[type, dict[str, Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Method:
    """Base of all methods: a frozen dataclass of the paper's hyper-parameters, without state."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    formula: ClassVar[str] = ""
    takes_budget: ClassVar[bool] = True
    # True if no stage mixes KV heads; tensor parallelism is exact only then
    by_head: ClassVar[bool] = False
    nested: ClassVar[bool] = False  # a smaller budget keeps a part of what a larger one keeps

    def stages(self) -> Stages:
        """The stages of this method; raises KvfoldError if a subclass does not define them."""
        raise KvfoldError(f"{type(self).__name__} names no stages")

    def brings(self) -> Stages:
        """The stages that it adds to other methods in a composition."""
        return self.stages()

    def brings_sizes(self) -> Stages | None:
        """The stages that it adds to a method that scores; None: as `brings`."""
        return None

    def check_range(self, least: float, most: float | None, *options: str) -> None:
        """Raises KvfoldError, naming the option, unless each is from `least` to `most`.

        `most` None: no limit.
        """
        for option in options:
            value = getattr(self, option)
            if not least <= value <= (math.inf if most is None else most):
                wanted = f"{least} or more" if most is None else f"from {least} to {most}"
                raise KvfoldError(f"{called(self)}:{option} is {wanted}, not {value!r}")

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changed = [
            f"{f.name}={as_text(values[f.name])}"
            for f in dataclasses.fields(self)
            if values[f.name] != f.default
        ]
        return called(self) + (":" + ",".join(changed) if changed else "")


def called(method: Method) -> str:
    """Registered name of the method; the class's name if it is not registered itself."""
    return str(vars(type(method)).get("name") or type(method).__name__)


def kinds_of(cls: type[Method]) -> dict[str, Any]:
    """Kind of each option of a method class, by its type hint; Any where hints name the unknown."""
    kinds = _KINDS.get(cls)
    if kinds is None:
        kinds = {option.name: _kind(cls, option) for option in dataclasses.fields(cls)}
        _KINDS[cls] = kinds
    return kinds


def _kind(cls: type[Method], option: dataclasses.Field[Any]) -> Any:
    """Kind of one option; Any where its hint is a name that its file imports for type checkers."""
    owner = next(each for each in cls.__mro__ if option.name in inspect.get_annotations(each))
    alone = SimpleNamespace(__annotations__={option.name: option.type})
    try:
        return typing.get_type_hints(alone, vars(sys.modules[owner.__module__]))[option.name]
    except NameError:
        return Any


def check_options(method: Method, name: str) -> None:
    """Raises KvfoldError, naming the option, for a value that no text would give it.

    That is one of another kind than the option's, or a number outside int32 or float32. Options of
    kinds that no text can give are not checked.
    """
    for option, kind in kinds_of(type(method)).items():
        value = getattr(method, option)
        if type(value) is not kind and not _is_of(value, kind):
            raise KvfoldError(f"{name}:{option} takes {_in_words(kind)}, not {value!r}")
        for number in value if isinstance(value, tuple) else (value,):
            most = next((LARGEST[each] for each in LARGEST if _is_of(number, each)), None)
            if most is not None and not abs(number) <= most:
                raise KvfoldError(
                    f"{name}:{option} is a number from {-most:g} to {most:g}, not {number:.3g}"
                )


def from_text(method: Method, option: str, text: str) -> Any:
    """Value of a method's `option` that a text spells; raises KvfoldError for any other text."""
    kinds = kinds_of(type(method))
    if option not in kinds and option in BUDGETS:
        raise KvfoldError(
            f"{option} is no option of a method: the budget stands beside it, budget=0.2 or "
            "--budget 0.2"
        )
    if option not in kinds:
        raise KvfoldError(
            f"{method.name} has no option {option!r}; it has {', '.join(kinds) or 'none'}"
        )
    kind = kinds[option]
    try:
        if typing.get_origin(kind) is typing.Literal:
            return next(choice for choice in typing.get_args(kind) if str(choice) == text)
        if kind is bool:
            return TRUTHS[text.lower()]
        if typing.get_origin(kind) is tuple:
            number = _number if typing.get_args(kind)[0] is float else int
            return () if text == "none" else tuple(map(number, text.split("/")))
        return kind(unquote(text, errors="strict") if _is_text(kind) else text)
    except (ValueError, TypeError, KeyError, StopIteration):
        raise KvfoldError(f"{method.name}:{option} takes {_in_words(kind)}, not {text!r}") from None


def as_text(value: Any) -> str:
    """Value of an option as a method's text spells it, "a%2Bb" for a file named "a+b"."""
    if isinstance(value, tuple):
        return "/".join(map(str, value)) or "none"
    if isinstance(value, str | os.PathLike):
        return MARKS.sub(lambda found: quote(found[0], safe=""), str(value))
    return str(value).replace("e+", "e")  # "+" composes methods


def _is_of(value: Any, kind: Any) -> bool:
    """True if a value is of that kind: a choice that is spelled alike, an int that is no bool.

    Whole numbers may be numpy's, and names of files paths.
    """
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return any(str(value) == str(choice) and value == choice for choice in arguments)
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(item, arguments[0]) for item in value)
    if kind is bool:
        return type(value) is kind
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, float) or _is_of(value, int)
    if kind is FileName and isinstance(value, os.PathLike):
        return True
    return isinstance(value, str) or not _is_text(kind)


def _number(text: str) -> float:
    """A whole number as an int, another as a float."""
    return int(text) if text.isdecimal() else float(text)


def _is_text(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, str)


def _in_words(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        whole = "whole " if typing.get_args(kind)[0] is int else ""
        return f"{whole}numbers with / between them"
    return IN_WORDS.get(kind) or str(getattr(kind, "__name__", kind))
