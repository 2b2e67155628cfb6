# SPDX-License-Identifier: Apache-2.0
"""`kvfold methods`: all registered methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvfold.cli.console import table
from kvfold.cli.options import Json
from kvfold.terminal import console, print_json

if TYPE_CHECKING:
    from kvfold.methods.base import Method, Stages


DECODE = {
    "append": "generated tokens on top",
    "hold": "holds its size",
    "once": "compresses at the first generated token",
}


def command(as_json: Json = False) -> None:
    """List every method: what it does at each stage, its paper, its defaults."""
    import kvfold
    from kvfold.methods.registry import preset

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


def _as_json(name: str, method: Method) -> dict[str, Any]:
    return {
        "name": name,
        "summary": method.summary,
        "stages": _stages(method),
        "paper": method.paper,
        "takes_budget": method.takes_budget,
        "defaults": dataclasses.asdict(method),
    }


def _stages(method: Method) -> str:
    """The stages of a method in words; of one that cannot stand alone, those it adds."""
    from kvfold import IllegalComposition

    try:
        return in_words(method.stages())
    except IllegalComposition:
        return f"adds to another method: {in_words(method.brings())}"


def in_words(stages: Stages) -> str:
    """Stages of a method as a list in words."""
    parts = []
    if stages.score is not None:
        parts = [f"observes {_observed(stages)}", _sizes(stages)]
        forced = _forced(stages)
        parts += [f"always keeps {forced}"] if forced else []
    parts += [f"selects by {_name(stages.select)}"] if stages.select else []
    parts += [f"{_name(stages.merge)}"] if stages.merge else []
    parts += [f"stored by {type(stages.encode).__name__.lower()}"] if stages.encode else []
    if stages.score is not None:
        parts.append(DECODE[stages.decode])
    parts += ["kept tokens re-indexed"] if stages.positions == "reindex" else []
    parts += ["prunes tokens between layers"] if stages.token_pruning else []
    return ", ".join(parts) or "keeps every entry"


def defaults(method: Method) -> str:
    """Options of a method with their values, in the syntax of a method's text."""
    values = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    return " ".join(f"{name}={_value(value)}" for name, value in values.items())


def _sizes(stages: Stages) -> str:
    """Allocation of the budget over layers and heads, in words."""
    from kvfold.methods.base import Across, Measured

    allocate = stages.allocate
    if isinstance(allocate, Measured):
        return f"sizes by {_name(allocate.size)}"
    if isinstance(allocate, Across):
        return f"{_name(allocate.share)} budgets"
    assert allocate is not None
    heads = f", {_name(stages.heads)} over heads" if stages.heads else ""
    return f"{_name(allocate)} budgets{heads}"


def _observed(stages: Stages) -> str:
    needs = stages.needs
    parts = ["attention sums"] if needs.column_sums else []
    parts += ["their squares"] if needs.column_squares else []
    parts += ["the text being repeated"] if needs.reconstruction else []
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
