# SPDX-License-Identifier: Apache-2.0
"""Descriptions of methods for people: options and stages, in words, for pages and commands."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvfold.errors import IllegalComposition, KvfoldError
from kvfold.fitted.numbers import NO_FILE, FileName
from kvfold.methods.base import Across, Measured, Method, Stages, called, parse, parts_of
from kvfold.methods.method import as_text as as_text
from kvfold.methods.method import kinds_of
from kvfold.methods.registry import list_methods, preset

NOTHING = "nothing"
# A field of a dataclass, and the comment behind it
FIELD = re.compile(r"^    (\w+): [^#]*?(?:# (.+))?$", re.MULTILINE)


@dataclass(frozen=True)
class Option:
    """An option of a method: its name, kind and default as texts, and the comment behind it."""

    name: str
    kind: str
    default: str
    about: str


@dataclass(frozen=True)
class StageUse:
    """A method's part in one stage: a function or class with its options, or a text only."""

    stage: str
    about: str  # first paragraph of the function's docstring
    function: Callable[..., Any] | None = None
    options: tuple[tuple[str, str], ...] = ()


def options(cls: type[Method]) -> list[Option]:
    """Options of a method class, in order; `about` is "" where the source has no comment."""
    comments = _comments(cls)
    kinds = kinds_of(cls)
    return [
        Option(f.name, _kind(kinds[f.name]), as_text(f.default), comments.get(f.name, ""))
        for f in dataclasses.fields(cls)
    ]


def shortest(text: str) -> str:
    """A method's text by the presets that leave the fewest options to name.

    `kvzip:normalize=True` is kvzip_plus. Methods that are not registered here stay as they are.
    """
    try:
        method = parse(text)
    except KvfoldError:
        return text
    return " + ".join(map(_shortest, parts_of(method)))


def files_of(method: Method) -> dict[str, FileName]:
    """Files that the method's options name, each by "method:option"."""
    named = {
        f"{called(part)}:{option}": FileName(getattr(part, option))
        for part in parts_of(method)
        for option in _file_options(part)
    }
    return {option: file for option, file in named.items() if file != NO_FILE}


def without_files(text: str) -> str:
    """A method's text without the options that name files; what is no method stays as it is."""
    try:
        method = parse(text)
    except KvfoldError:
        return text
    if not files_of(method):
        return text
    return " + ".join(map(_without_files, parts_of(method)))


def _without_files(method: Method) -> str:
    none: dict[str, Any] = dict.fromkeys(_file_options(method), NO_FILE)
    return str(dataclasses.replace(method, **none))


def _file_options(method: Method) -> list[str]:
    """Options that name files, by their kind: in Python a plain string may name one too."""
    return [option for option, kind in kinds_of(type(method)).items() if kind is FileName]


def _shortest(method: Method) -> str:
    known = [name for name, cls in list_methods().items() if cls is type(method)]
    texts = [(_options_beside(preset(name), method), name) for name in sorted(known, key=len)]
    options, name = min(texts, key=lambda found: len(found[0]))
    return name + (":" + ",".join(options) if options else "")


def _options_beside(base: Method, method: Method) -> list[str]:
    """Options of a method that differ from those of `base`."""
    changed = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    return [f"{n}={as_text(value)}" for n, value in changed.items() if value != getattr(base, n)]


def stages_of(method: Method) -> tuple[Stages, bool]:
    """Stages of a method, and True if it stands alone; else those that it adds to another."""
    try:
        return method.stages(), True
    except IllegalComposition:
        return method.brings(), False


def steps(stages: Stages) -> list[StageUse]:
    """The stages that do something, in the order in which they run."""
    allocate, found = stages.allocate, list[StageUse]()
    if stages.score is not None or observed(stages) != NOTHING:
        found.append(StageUse("observe", observed(stages)))
    found += _of("score", stages.score)
    if isinstance(allocate, Measured):
        found += _of("allocate", allocate.size)
    elif isinstance(allocate, Across):
        found += [*_of("statistic", allocate.statistic), *_of("allocate", allocate.share)]
    else:
        found += _of("allocate", allocate)
    found += _of("heads", stages.heads)
    if stages.forced:
        found.append(StageUse("forced", forced(stages)))
    found += _of("select", stages.select)
    found += _of("merge", stages.merge and stages.merge.all)
    found += _of("refit", stages.refit)
    found += _of("encode", stages.encode)
    found += _of("token pruning", stages.token_pruning)
    if stages.score is not None or stages.rounds:
        found.append(StageUse("decode", stages.when.describe()))
    if stages.positions != "original":
        found.append(StageUse("positions", "kept tokens re-indexed"))
    return found


def in_words(stages: Stages) -> str:
    """Stages of a method as a list in words."""
    parts = []
    if stages.score is not None:
        parts = [f"observes {observed(stages)}", _sizes(stages)]
        always = forced(stages)
        parts += [f"always keeps {always}"] if always else []
    parts += [f"selects by {_words(stages.select)}"] if stages.select else []
    parts += [f"{_words(stages.merge.all)}"] if stages.merge else []
    parts += ["refits what is kept"] if stages.refit else []
    parts += [f"stored by {type(stages.encode).__name__.lower()}"] if stages.encode else []
    if stages.score is not None or stages.rounds:
        parts.append(stages.when.describe())
    parts += ["kept tokens re-indexed"] if stages.positions != "original" else []
    parts += ["prunes tokens between layers"] if stages.token_pruning else []
    return ", ".join(parts) or "keeps every entry"


def observed(stages: Stages) -> str:
    """Data that the stages read beside keys, values and positions, in words."""
    needs = stages.needs
    parts = ["the newest queries"] if stages.token_pruning else []
    parts += [need.describe() for need in needs.by_kind.values()]
    return " and ".join(parts) or NOTHING


def forced(stages: Stages) -> str:
    """Entries that always stay, in words; "" if none do."""
    sinks, recent = stages.forced.sinks, stages.forced.recent
    parts = [f"the first {sinks}"] if sinks else []
    if not isinstance(recent, int):
        parts.append(f"the newest {recent.of_kept:.0%} of the budget")
    elif recent:
        parts.append(f"the last {recent}")
    return " and ".join(parts)


def _comments(cls: type[Method]) -> dict[str, str]:
    """Comments behind the fields of a class; none if its source cannot be read."""
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        return {}
    return dict(FIELD.findall(source))


def _kind(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return f"list of {typing.get_args(kind)[0].__name__}"
    name = str(kind.__name__)
    return {"str": "text", "FileName": "file name"}.get(name, name)


def _of(stage: str, use: Any) -> list[StageUse]:
    """The step of one stage: a function, a partial of one, or a dataclass such as an encoding."""
    if use is None:
        return []
    function = use.func if isinstance(use, partial) else use
    values: dict[str, Any] = use.keywords if isinstance(use, partial) else {}
    if dataclasses.is_dataclass(use) and not isinstance(use, type):
        function = type(use)
        values = {f.name: getattr(use, f.name) for f in dataclasses.fields(use)}
    about = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    shown = tuple((name, _shown(value)) for name, value in values.items())
    return [StageUse(stage, about, function, shown)]


def _shown(value: Any) -> str:
    return _name(value) if callable(value) else as_text(value)


def _sizes(stages: Stages) -> str:
    """Allocation of the budget over layers and heads, in words."""
    allocate = stages.allocate
    if isinstance(allocate, Measured):
        return f"sizes by {_words(allocate.size)}"
    if isinstance(allocate, Across):
        return f"{_words(allocate.share)} budgets"
    assert allocate is not None
    heads = f", {_words(stages.heads)} over heads" if stages.heads else ""
    return f"{_words(allocate)} budgets{heads}"


def _name(stage: Callable[..., Any]) -> str:
    function = stage.func if isinstance(stage, partial) else stage
    return str(function.__name__)


def _words(stage: Callable[..., Any]) -> str:
    return _name(stage).replace("_", " ")
