# SPDX-License-Identifier: Apache-2.0
"""`kvfold methods`: every registered method, read from the registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvfold.cli.console import console, table

if TYPE_CHECKING:
    from kvfold.method import Method, Stages


def command() -> None:
    """List every method: what it does at each stage, its paper, its defaults."""
    import kvfold
    from kvfold.method import preset

    shown = table(None, "name", "stages", "paper", "defaults")
    for name in kvfold.methods():
        method = preset(name)
        shown.add_row(name, in_words(method.stages()), method.paper or "-", defaults(method))
    out = console()
    out.print(shown)
    out.print('Options go after a colon: --method "snapkv:window=16,kernel=5".')


def in_words(stages: Stages) -> str:
    """The stages of a method, as a short sentence."""
    if stages.score is None:
        return "keeps every entry"
    parts = [f"observes {_observed(stages)}"]
    if stages.allocate is not None:
        parts.append(f"{_name(stages.allocate)} budgets")
    forced = _forced(stages)
    parts += [f"always keeps {forced}"] if forced else []
    parts.append("holds its size" if stages.decode == "hold" else "generated tokens on top")
    parts += ["kept tokens re-indexed"] if stages.positions == "reindex" else []
    return ", ".join(parts)


def defaults(method: Method) -> str:
    """The fields of a method and their values, as they are written in a method's text."""
    values = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    return " ".join(f"{name}={_value(value)}" for name, value in values.items())


def _observed(stages: Stages) -> str:
    needs = stages.needs
    parts = ["attention sums"] if needs.column_sums else []
    if needs.window:
        parts.append("the last query" if needs.window == 1 else f"the last {needs.window} queries")
    return " and ".join(parts) or "nothing"


def _forced(stages: Stages) -> str:
    sinks, recent = stages.forced.sinks, stages.forced.recent
    parts = [f"the first {sinks}"] if sinks else []
    if not isinstance(recent, int):
        parts.append(f"the newest {recent.of_kept:.0%} of the budget")
    elif recent:
        parts.append(f"the last {recent}")
    return " and ".join(parts)


def _name(stage: Callable[..., Any]) -> str:
    function = stage.func if isinstance(stage, partial) else stage
    return str(function.__name__).replace("_", " ")


def _value(value: Any) -> str:
    return "/".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
