# SPDX-License-Identifier: Apache-2.0
"""Pages of the methods, made from the registry."""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import kvfold
from docs.generate import leaderboard
from docs.generate.links import source
from docs.generate.made import ROOT, table
from kvfold.errors import IllegalComposition
from kvfold.evidence.grouped import grouped
from kvfold.methods.base import Method, Stages, parse
from kvfold.methods.description import as_text, observed, options, stages_of, steps
from kvfold.methods.registry import preset

STAGES = "kvfold.methods.stages."
# A repository in the last sentence of a docstring, such as FasterDecoding/SnapKV
REPOSITORY = re.compile(r"(?<![\w`/])([\w-]+/[\w.-]*\w)(?![\w`/])")
# The part of a refusal that does not name the two methods
BOTH = re.compile(r"both bring the \w+ stage")
COLUMNS = "name", "what it does", "observes beside the entries", "takes a budget", "source"
SYMBOLS_LINK = "[What the symbols mean](index.md#symbols)"
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def classes() -> dict[str, type[Method]]:
    """kvfold's own method classes by name, without the names of presets."""
    known = kvfold.list_methods()
    return {n: c for n, c in known.items() if n == c.name and c.__module__.startswith("kvfold.")}


def presets(cls: type[Method]) -> dict[str, Method]:
    """Presets of a class by name."""
    known = kvfold.list_methods()
    return {name: preset(name) for name in known if known[name] is cls and name != cls.name}


def overview() -> str:
    """The page that lists all methods."""
    rows = [
        [f"[`{name}`]({name}.md)", _plain(cls.summary), observed(stages_of(preset(name))[0]),
         "yes" if cls.takes_budget else "no", _paper(cls) or _origin(cls) or "–"]
        for name, cls in classes().items()
    ]  # fmt: skip
    parts = ["# Methods", TEXTS["introduction"], table(COLUMNS, rows), TEXTS["symbols"]]
    return "\n\n".join(parts)


def page(cls: type[Method]) -> str:
    """The page of one method class, from the registry."""
    method = preset(cls.name)
    stages, alone = stages_of(method)
    parts = [f"# {cls.__name__}", _title(cls), _docstring(cls)]
    if cls.formula:
        parts += ["## Formula", f"```text\n{cls.formula}\n```", SYMBOLS_LINK]
    parts += ["## Options", _options(cls), *_presets(cls)]
    parts += ["## Stages", _stages(stages, alone), _facts(method, stages)]
    parts += ["## Composition", *_composition(cls)]
    parts += ["## Leaderboard", leaderboard.section(cls)]
    return "\n\n".join(part for part in parts if part)


def _title(cls: type[Method]) -> str:
    """Names, paper and file, in one line."""
    names = ", ".join(f"`{name}`" for name in (cls.name, *presets(cls)))
    file = Path(inspect.getfile(cls)).relative_to(ROOT).as_posix()
    return " · ".join(filter(None, [names, _paper(cls), f"[{file}]({source(file)})"]))


def _docstring(cls: type[Method]) -> str:
    """The docstring, with links to the files and repositories that it names."""
    text = inspect.getdoc(cls) or ""
    body, mark, origin = text.partition("\nSource: ")
    body = re.sub(r"\bdocs/([\w/-]+\.md)", r"[\1](../\1)", body)
    linked = REPOSITORY.sub(r"[\1](https://github.com/\1)", origin)
    return body + (f"\n\n**Source**: {linked}" if mark else "")


def _options(cls: type[Method]) -> str:
    found = options(cls)
    if not found:
        return "None."
    rows = [[f"`{o.name}`", o.kind, f"`{o.default}`", o.about] for o in found]
    return table(("option", "kind", "default", "what it is"), rows)


def _presets(cls: type[Method]) -> list[str]:
    known = presets(cls)
    if not known:
        return []
    rows = [[f"`{name}`", _changes(method)] for name, method in known.items()]
    return ["### Presets", table(("name", "values that differ"), rows)]


def _changes(method: Method) -> str:
    values = [(f.name, getattr(method, f.name), f.default) for f in dataclasses.fields(method)]
    return ", ".join(f"`{name}={as_text(value)}`" for name, value, own in values if value != own)


def _stages(stages: Stages, alone: bool) -> str:
    rows = []
    for step in steps(stages):
        given = ", ".join(f"{name}={value}" for name, value in step.options)
        rows.append([step.stage, _function(step.function), given, step.about])
    if not rows:
        return "None: every entry stays as it is."
    before = "" if alone else "Stages that it adds to another method:\n\n"
    return before + table(("stage", "function", "with", "what it gives"), rows)


def _function(function: Any) -> str:
    """Name of a stage's function, with a link to its reference or to its file; "" of none."""
    if not function:
        return ""
    name, module = function.__name__, function.__module__
    if module.startswith(STAGES):
        return f"[`{name}`][{module}.{name}]"
    return f"[`{name}`]({source(module.replace('.', '/') + '.py')})"


def _facts(method: Method, stages: Stages) -> str:
    lines = ["Budget: taken." if method.takes_budget else "Budget: none is taken."]
    if method.by_head:
        lines.append("Tensor parallelism: exact, as no stage mixes KV heads.")
    else:
        lines.append("Tensor parallelism: refused, as a stage mixes KV heads.")
    if stages.runs_own_forwards:
        lines.append("A prompt is read with forwards of the method's own.")
    return "\n".join(f"- {line}" for line in lines)


def _composition(cls: type[Method]) -> list[str]:
    """Methods that it composes with, and the reasons why it does not with the others."""
    refused = _refusals(cls, cls.name)
    legal = refused.pop("", [])
    alone = "With its defaults it composes with no other method."
    parts = [f"`{cls.name} +` {_linked(legal)}." if legal else alone]
    if any(option.name == "decode" and option.default == "hold" for option in options(cls)):
        appending = f"{cls.name}:decode=append"
        more = [name for name in _refusals(cls, appending).get("", []) if name not in legal]
        parts += [f"`{appending} +` also {_linked(more)}."] if more else []
    if refused:
        lines = "\n".join(f"    - {_linked(names)}: {why}." for why, names in refused.items())
        parts.append(f'??? note "Refused with {sum(map(len, refused.values()))} others"\n{lines}')
    return parts


def _refusals(cls: type[Method], text: str) -> dict[str, list[str]]:
    """Names of the other methods by the reason of refusal; "" for those that `text` composes with.

    The full cache is left out, as it adds nothing.
    """
    others = (other for other in classes() if other not in (cls.name, "full"))
    return grouped((_refusal(text, other), other) for other in others)


def _refusal(one: str, other: str) -> str:
    """Reason why two methods do not compose, "" if they do."""
    try:
        parse(f"{one} + {other}")
    except IllegalComposition as problem:
        both = BOTH.search(str(problem))
        return both[0] if both else str(problem)
    return ""


def _linked(names: list[str]) -> str:
    return ", ".join(f"[`{name}`]({name}.md)" for name in names)


def _paper(cls: type[Method]) -> str:
    number = cls.paper.removeprefix("arXiv ")
    return f"[{cls.paper}](https://arxiv.org/abs/{number})" if cls.paper else ""


def _origin(cls: type[Method]) -> str:
    """The publication that the docstring names as its source."""
    return (inspect.getdoc(cls) or "").partition("\nSource: ")[2].partition(";")[0].rstrip(".")


def _plain(text: str) -> str:
    """Text with the characters escaped that would end a cell of a table."""
    return text.replace("|", "\\|")
