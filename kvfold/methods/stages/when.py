# SPDX-License-Identifier: Apache-2.0
"""When entries leave: the choices, and those that contradict other stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args
from warnings import warn

from kvfold.errors import IllegalComposition

Prompt = Literal["counted", "kept"]
Sizes = Literal["fixed", "again"]
Counting = Literal["generated", "absolute"]
Positions = Literal["original", "reindex", "consecutive"]


@dataclass(frozen=True)
class AtEnd:
    """When a prompt ends; generated tokens are added to what stays."""

    def describe(self) -> str:
        """Treatment of generated tokens, in words."""
        return "generated tokens on top"


@dataclass(frozen=True)
class Once:
    """At the first generated token, by its query, instead of the prompt's end."""

    def describe(self) -> str:
        """Treatment of generated tokens, in words."""
        return "compresses at the first generated token"


@dataclass(frozen=True)
class Hold:
    """After each generated token too, by its query, down to the size at the prompt's end."""

    def describe(self) -> str:
        """Treatment of generated tokens, in words."""
        return "holds its size"


@dataclass(frozen=True)
class Rounds:
    """After each `every` generated tokens too, by the scores of all entries.

    `prompt` "kept": all but the answer is beside the size. `sizes` "again": each round shares a
    layer's size among its heads anew. `counting` "absolute": tokens are counted from the text's
    first one. Raises IllegalComposition for other values.
    """

    every: int
    prompt: Prompt = "counted"
    sizes: Sizes = "fixed"
    counting: Counting = "generated"

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise IllegalComposition(f"rounds are of 1 token or more, not {self.every!r}")
        for name, choices in (("prompt", Prompt), ("sizes", Sizes), ("counting", Counting)):
            known, given = get_args(choices), getattr(self, name)
            if given not in known:
                raise IllegalComposition(f"{name} is {' or '.join(known)}, not {given!r}")

    def describe(self) -> str:
        """Treatment of generated tokens, in words."""
        kept = ", beside what the prompt left" if self.prompt == "kept" else ""
        return f"back to its size every {self.every} generated tokens{kept}"

    def after(self, seen: int, turn_end: int) -> int:
        """Columns at which the next round comes, of an answer after `turn_end` that has `seen`."""
        began = 0 if self.counting == "absolute" else turn_end
        return began + self.every * ((seen - began) // self.every + 1)


When = AtEnd | Once | Hold | Rounds
# The options of `Stages` that `Rounds` took the place of, as they were without rounds; until 0.2
OLD = {"every": 0, "prompt": "counted", "sizes": "fixed", "phase": "generated"}
NEW_NAMES = {"every": "every", "prompt": "prompt", "sizes": "sizes", "phase": "counting"}


def when_of(decode: str, every: int = 128) -> When:
    """The `When` that a method's option `decode` names: append, hold or every."""
    found: dict[str, When] = {"append": AtEnd(), "hold": Hold(), "every": Rounds(every)}
    return found[decode]


def of_old_options(given: dict[str, Any]) -> When | None:
    """The `When` that replaced options of `Stages` name; None without any."""
    told = {name: value for name, value in given.items() if value is not None}
    if not told:
        return None
    options = ", ".join(f"{name}={value!r}" for name, value in told.items())
    warn(f"Stages({options}) is Stages(when=…) now", DeprecationWarning, stacklevel=4)
    decode = told.pop("decode", "append")
    rounds = {NEW_NAMES[name]: value for name, value in told.items() if value != OLD[name]}
    if decode == "every" and "every" in rounds:
        return Rounds(**rounds)
    if rounds or decode not in ("append", "hold", "once"):
        raise IllegalComposition(
            f"{options} name no time at which entries leave: choose AtEnd(), Once(), Hold() or "
            "Rounds(every)"
        )
    return Once() if decode == "once" else when_of(decode)
