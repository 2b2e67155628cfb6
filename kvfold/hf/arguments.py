# SPDX-License-Identifier: Apache-2.0
"""Arguments of public functions: in a wrong order, of other libraries, or a file's name as text."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import nn

from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.hf.user_text import Content

P = ParamSpec("P")
R = TypeVar("R")

PLACES = ("first", "second", "third")
TEXTS = ("document", "opening")
FILES = ("path", "out", "data", "haystack")
COUNTS = ("tokens", "samples", "max_length", "answer_tokens", "batch_size")
NAMES = ("tasks",)  # one, or several
# Keywords of other libraries: the part of the entries that goes, or a method.
PARTS, METHODS = ("compression_ratio", "ratio"), ("press",)
# Keywords by which other libraries are given a system message, or arguments of the chat template.
SYSTEMS, WHOLE = ("system", "system_prompt", "system_message"), "chat_template_kwargs"
OF_TEMPLATES = (WHOLE, "template", "enable_thinking", "reasoning_effort", "tools", "documents")
LENGTHS = ("max_tokens", "max_completion_tokens")  # of an answer
# Keywords of kvfold, of functions beside those that take a cache or a context.
OWN = ("budget", "method")
LONGEST_NAME = 1024  # characters


def checked_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose model, tokenizer, texts, files, counts and names of tasks are checked.

    It then raises UnsupportedModel for a wrapper of torch.compile and for what is no model, and
    KvfoldError for other wrong ones and for keywords of other libraries.
    """
    parameters = inspect.signature(function).parameters
    names = [name for name in parameters if name != "self"]
    bound = len(parameters) - len(names)

    @wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        _check_foreign(names, options)
        given = dict(zip(names, args[bound:], strict=False)) | options
        for place, name in enumerate(names):
            if name in given and not (given[name] is None and parameters[name].default is None):
                _check(name, given[name], _order(function, names, place))
        return function(*args, **options)

    return checked


def _check(name: str, value: Any, order: str) -> None:
    """Raises as `checked_arguments`; `order` begins the message for a value of another kind."""
    if name == "model" and hasattr(value, "_orig_mod"):
        raise UnsupportedModel(
            "torch.compile(model) returns a wrapper, which cannot generate: give the model itself, "
            "and compile it in place with model.compile()"
        )
    if name == "model" and not isinstance(value, nn.Module):
        found = f"{order}, not {_shown(value)}"
        raise UnsupportedModel(f"{found}: load it first" if isinstance(value, str) else found)
    if name == "tokenizer" and not (callable(value) and hasattr(value, "decode")):
        raise KvfoldError(f"{order}, not {_shown(value)}")
    if name in TEXTS:
        check_text(value)
    if name in FILES:
        check_path(value, order)
    if name in COUNTS:
        count_of(name, value)
    several = value if isinstance(value, list | tuple) else [value]
    if name in NAMES and not all(isinstance(each, str) for each in several):
        raise KvfoldError(f"{name} are texts, not {_shown(value)}")


def check_text(text: Any) -> None:
    """Raises KvfoldError for a path, and for the name of a file that exists, in place of its text.

    A `Content` is known to be a text.
    """
    if isinstance(text, Content):
        return
    named = isinstance(text, str) and 0 < len(text) <= LONGEST_NAME and text.isprintable()
    if isinstance(text, os.PathLike) or (named and os.path.isfile(text)):
        raise KvfoldError(
            f"this is a file's name: {os.fspath(text)!r}; give its text, "
            'pathlib.Path(name).read_text(encoding="utf-8")'
        )


def check_path(path: Any, what: str) -> None:
    """Raises KvfoldError for an empty path, and for what is none; `what` begins the message."""
    if not isinstance(path, str | os.PathLike):
        raise KvfoldError(f"{what}, not {_shown(path)}")
    if isinstance(path, str) and not path.strip():
        raise KvfoldError("the file's name is empty: give for example document.kvfold")
    try:
        named = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        named = False
    if not named:
        raise KvfoldError(f"no file can have the name {os.fspath(path)!r}: give another one")


def count_of(name: str, given: Any) -> int:
    """A count of Python's, numpy's or torch's; raises KvfoldError for what is none from 1 on."""
    try:
        count = operator.index(given)
    except TypeError:
        count = 0
    if count < 1:
        raise KvfoldError(f"{name} is a whole number from 1 on, not {_shown(given)}")
    return count


def _order(function: Callable[..., Any], names: list[str], place: int) -> str:
    """Words such as "the model comes first: compress(model, tokenizer, document)"."""
    called = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    which = PLACES[place] if place < len(PLACES) else "by its name"
    return f"the {names[place]} comes {which}: {called}({', '.join(names[: len(PLACES)])})"


def _shown(value: Any) -> str:
    return repr(value)[:60] if isinstance(value, str | int | float) else f"a {type(value).__name__}"


def _check_foreign(names: list[str], options: dict[str, Any]) -> None:
    """Raises KvfoldError for keywords that other libraries have for a budget or a method."""
    later = any(each in names for each in ("cache", "question", "messages"))
    for name in options:
        if name in names:
            continue
        if name in (*SYSTEMS, *OF_TEMPLATES):
            raise KvfoldError(f"{name}= is no argument here: {_of_prompt(name, names)}")
        if name in LENGTHS and "max_new_tokens" in names:
            raise KvfoldError(f"{name}= is no argument here: write max_new_tokens=")
        if name not in (*PARTS, *METHODS, *(OWN if later else ())):
            continue
        wanted, why = 'method="snapkv"', "the method is a text"
        if name == "budget":
            wanted, why = "budget=0.5", "it belongs to the cache"
        elif name in PARTS:
            wanted, why = f"budget={_kept(name, options[name])}", "budget is the part kept"
        keyword, _, value = wanted.partition("=")
        found = next((each for each in (keyword, f"{keyword}s") if each in names), None)
        if found is not None:
            remedy = f"{found}={value}"
        elif "cache" in names:
            remedy = f"kvfold.CompressedCache(model, {wanted})"
        else:
            remedy = "it was chosen when the text was compressed, leave it out"
        raise KvfoldError(f"{name}= is no argument here; {why}: {remedy}")


def _of_prompt(name: str, names: list[str]) -> str:
    """Advice on a system message, or on an argument of the chat template."""
    if name in SYSTEMS and "system" in names:
        return "write system="
    if name not in SYSTEMS and "template" in names:
        return f"write template={'' if name == WHOLE else {name: '…'}}"
    if "opening" in names:
        return "a session has its opening only, say it there"
    if "cache" in names:
        return "give a prompt that holds it, as tokenizer.apply_chat_template makes it"
    return "give it when the text is compressed, kvfold.compress(…, system=…, template=…)"


def _kept(name: str, value: Any) -> float:
    """The part kept, where a `compression_ratio` says how much goes; else that of an example."""
    told = name == "compression_ratio" and isinstance(value, int | float) and 0 < value < 1
    return round(1 - value, 6) if told else 0.6
