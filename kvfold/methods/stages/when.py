# SPDX-License-Identifier: Apache-2.0
"""When entries leave: the choices, and those that contradict other stages."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args
from warnings import warn

from kvfold.errors import IllegalComposition
from kvfold.observers.last_queries import window_of
from kvfold.observers.query_moments import QueryMomentsNeed

if TYPE_CHECKING:
    from kvfold.methods.base import Stages

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
    """What a method's option `decode` names: append, hold or every."""
    found: dict[str, When] = {"append": AtEnd(), "hold": Hold(), "every": Rounds(every)}
    return found[decode]


def of_old_options(given: dict[str, Any]) -> When | None:
    """What the options of `Stages` that `when` replaces name; None without any."""
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


def check_when(stages: Stages) -> None:
    """Raises IllegalComposition for stages that do not go with the times at which entries leave."""
    if stages.positions not in get_args(Positions):
        known = " or ".join(get_args(Positions))
        raise IllegalComposition(f"positions is {known}, not {stages.positions!r}")
    hold = isinstance(stages.when, Hold)
    if stages.level == "best" and (stages.heads or not stages.uniform or hold):
        raise IllegalComposition(
            "all layers and heads keep the same tokens, so they are of one size, and none evicts "
            "alone while decoding: leave out the method that sizes layers or heads"
        )
    if stages.level not in (None, "best") and stages.evicts_while_decoding:
        raise IllegalComposition(
            "level makes one set of tokens when a prefill ends, and heads that evict while "
            "decoding would part again: choose decode=append where it is offered"
        )
    _check_observed(stages)
    _check_one_by_one(stages)
    _check_positions(stages)


def rounds_hold(stages: Stages) -> bool:
    """True if rounds of 1 evict for each generated token as `Hold` does.

    They cannot where a round reads queries of the answer, or does what `Hold` refuses.
    """
    if stages.rounds is None or stages.rounds.every > 1:
        return False
    needs, as_if_held = stages.needs, stages.rounds.prompt == "counted" and stages.level is None
    others = stages.heads, stages.select, stages.encode, stages.refit, needs.get(QueryMomentsNeed)
    return (
        as_if_held and stages.positions != "consecutive" and not (window_of(needs) or any(others))
    )


def replaced_rounds(brought: list[Stages]) -> list[Stages]:
    """Stages of a composition's parts, where rounds without a score replace those of a score."""
    if not any(stages.rounds and stages.score is None for stages in brought):
        return brought
    return [
        dataclasses.replace(stages, when=AtEnd()) if stages.rounds and stages.score else stages
        for stages in brought
    ]


def _check_observed(stages: Stages) -> None:
    """Raises IllegalComposition for stages that read what is not there when they run."""
    if isinstance(stages.when, Once) and window_of(stages.needs) > 1:
        raise IllegalComposition(
            "compression at the first generated token sees the query of that token alone, and "
            f"{window_of(stages.needs)} queries are needed: choose a method that compresses at the "
            "prompt's end, such as simlayerkv:when=last_query"
        )
    if stages.rounds and stages.runs_own_forwards:
        raise IllegalComposition(
            "forwards of its own run when a prompt ends, not while an answer is generated: "
            "leave every out, or choose another method that scores"
        )


def _check_one_by_one(stages: Stages) -> None:
    """Raises IllegalComposition for stages that cannot evict while tokens come one by one."""
    per_head = getattr(stages.allocate, "per_head", False)
    held = stages.rounds and getattr(stages.allocate, "in_rounds", False)
    if stages.evicts_while_decoding and per_head and not held:
        raise IllegalComposition(
            "an allocation per head is made when a prefill ends, so it does not go with a method "
            "that evicts while decoding: choose decode=append where it is offered"
        )
    if stages.rounds and stages.rounds.sizes == "again" and per_head:
        raise IllegalComposition(
            "sizes=again shares a layer's size among its heads, whose sizes another method gives: "
            "leave sizes=again out"
        )
    alone = stages.encode is None or (stages.rounds and stages.encode.standalone)
    if stages.evicts_while_decoding and not alone:
        raise IllegalComposition(
            "encoded entries cannot be evicted one by one, so an encoding cannot follow a "
            "method that evicts while decoding: choose decode=append where it is offered"
        )
    if isinstance(stages.when, Hold) and stages.heads is not None:
        raise IllegalComposition(
            "budgets per head are set when a prefill ends, so they do not go with a method "
            "that evicts while decoding: choose decode=append where it is offered"
        )
    if isinstance(stages.when, Hold) and stages.select is not None:
        raise IllegalComposition(
            "entries that leave one by one while decoding are those of lowest score, so a "
            "method that selects otherwise does not go with a method that evicts while "
            "decoding: choose decode=append where it is offered"
        )


def _check_positions(stages: Stages) -> None:
    """Raises IllegalComposition for re-indexed positions of keys that cannot be rotated."""
    if stages.positions == "reindex" and (stages.encode or stages.heads):
        raise IllegalComposition(
            "re-indexed positions rotate stored keys, which must then be whole and dense: "
            'choose positions="original"'
        )
    if stages.positions == "consecutive" and (stages.encode or stages.token_pruning):
        raise IllegalComposition(
            "consecutive positions rotate kept keys at each eviction, and encoded entries, or "
            'tokens pruned between the layers, cannot be rotated: choose positions="original"'
        )
    if stages.positions == "consecutive" and isinstance(stages.when, Hold):
        raise IllegalComposition(
            "consecutive positions would rotate all kept keys at every step of a method that "
            "evicts while decoding: choose decode=append where it is offered"
        )
