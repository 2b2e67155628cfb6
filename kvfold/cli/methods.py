# SPDX-License-Identifier: Apache-2.0
"""`kvfold methods`: all registered methods, or one of them in full."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from kvfold.cli.options import Json
from kvfold.errors import KvfoldError
from kvfold.evidence.tables import table
from kvfold.terminal import console, print_json

if TYPE_CHECKING:
    from kvfold.methods.base import Method


def command(
    name: Annotated[str | None, typer.Argument(help="One method, shown in full.")] = None,
    as_json: Json = False,
) -> None:
    """List every method with its stages, paper and defaults."""
    import kvfold
    from kvfold.methods.base import parse
    from kvfold.methods.registry import preset, with_known_names

    if name is not None:
        if "+" in name:
            parse(name)
            raise KvfoldError(f"{name} is several methods: name one of them")
        name = with_known_names(name)
        shown_method = parse(name) if ":" in name else preset(name)
        print_json(_as_json(name, shown_method)) if as_json else _show(shown_method)
        return
    known = {name: preset(name) for name in kvfold.list_methods()}
    if as_json:
        print_json([_as_json(name, method) for name, method in known.items()])
        return
    shown = table(None, "name", "stages", "paper", "defaults")
    for name, method in known.items():
        shown.add_row(name, _stages(method), method.paper or "-", defaults(method))
    out = console()
    out.print(shown)
    out.print('Options go after a colon: --method "snapkv:window=16,kernel=5".')


def _show(method: Method) -> None:
    """Prints a method's docstring, formula, stages and options."""
    from kvfold.methods.description import as_text, options

    out = console()
    out.print(Text(inspect.getdoc(method) or method.summary))
    if method.formula:
        out.print(Text(f"\n{method.formula}", style="bold"))
    out.print(Text(f"\n{_stages(method)}" + (f"; {method.paper}" if method.paper else "")))
    shown = table(None, "option", "kind", "value", "what it is")
    for option in options(type(method)):
        value = as_text(getattr(method, option.name))
        shown.add_row(option.name, option.kind, value, option.about)
    if shown.row_count:
        out.print(shown)


def _as_json(name: str, method: Method) -> dict[str, Any]:
    return {
        "name": name,
        "summary": method.summary,
        "formula": method.formula,
        "stages": _stages(method),
        "paper": method.paper,
        "takes_budget": method.takes_budget,
        "defaults": dataclasses.asdict(method),
    }


def _stages(method: Method) -> str:
    """The stages of a method in words; of one that cannot stand alone, those it adds."""
    from kvfold.methods.description import in_words, stages_of

    stages, alone = stages_of(method)
    return in_words(stages) if alone else f"adds to another method: {in_words(stages)}"


def defaults(method: Method) -> str:
    """Options of a method with their values, in the syntax of a method's text."""
    from kvfold.methods.description import as_text

    values = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    return " ".join(f"{name}={as_text(value)}" for name, value in values.items())
