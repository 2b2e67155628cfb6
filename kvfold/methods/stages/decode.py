# SPDX-License-Identifier: Apache-2.0
"""Eviction while decoding, and positions: choices, and those that contradict one another."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, get_args

from kvfold.errors import IllegalComposition
from kvfold.observers.last_queries import window_of
from kvfold.observers.query_moments import QueryMomentsNeed

if TYPE_CHECKING:
    from kvfold.methods.base import Stages

Decode = Literal["append", "hold", "every", "once"]
Prompt = Literal["counted", "kept"]
Sizes = Literal["fixed", "again"]
Counting = Literal["generated", "absolute"]
Positions = Literal["original", "reindex", "consecutive"]
CHOICES = {
    "decode": Decode,
    "prompt": Prompt,
    "sizes": Sizes,
    "phase": Counting,
    "positions": Positions,
}
# What a method without rounds leaves at its default
OF_ROUNDS = {
    "decode": "append", "every": 0, "prompt": "counted", "sizes": "fixed", "phase": "generated",
}  # fmt: skip


def check_decode(stages: Stages) -> None:
    """Raises IllegalComposition for unknown choices, and for options without their stage."""
    for name, choices in CHOICES.items():
        known, given = get_args(choices), getattr(stages, name)
        if given not in known:
            raise IllegalComposition(f"{name} is {' or '.join(known)}, not {given!r}")
    every, rounds = stages.every, stages.decode == "every"
    if type(every) is not int or every < 0 or rounds != (every > 0):
        raise IllegalComposition('decode="every" goes with every=, of 1 token or more')
    if stages.prompt == "kept" and not rounds:
        raise IllegalComposition(
            'prompt="kept" leaves the budget to the answer, so it goes with decode="every" only'
        )
    if stages.sizes == "again" and not rounds:
        raise IllegalComposition(
            'sizes="again" shares a size among the heads in each round, so it goes with '
            'decode="every" only'
        )
    if stages.phase == "absolute" and not rounds:
        raise IllegalComposition(
            'phase="absolute" says which tokens rounds count, so it goes with decode="every" only'
        )
    if stages.agree and (stages.heads or not stages.uniform or stages.decode == "hold"):
        raise IllegalComposition(
            "all layers and heads keep the same tokens, so they are of one size, and none evicts "
            "alone while decoding: leave out the method that sizes layers or heads"
        )
    if stages.level is not None and stages.evicts_while_decoding:
        raise IllegalComposition(
            "level makes one set of tokens when a prefill ends, and heads that evict while "
            "decoding would part again: choose decode=append where it is offered"
        )
    _check_observed(stages)
    _check_one_by_one(stages)
    _check_positions(stages)


def rounds_hold(stages: Stages) -> bool:
    """True if rounds of 1 evict for each generated token as decode="hold" does.

    They cannot where a round reads queries of the answer, or does what "hold" refuses.
    """
    if stages.decode != "every" or stages.every > 1:
        return False
    needs, as_if_held = stages.needs, stages.prompt == "counted" and not stages.agree
    others = stages.heads, stages.select, stages.encode, stages.refit, needs.get(QueryMomentsNeed)
    return (
        as_if_held and stages.positions != "consecutive" and not (window_of(needs) or any(others))
    )


def replaced_rounds(brought: list[Stages]) -> list[Stages]:
    """Stages of a composition's parts, where rounds without a score replace those of a score."""
    if not any(stages.decode == "every" and stages.score is None for stages in brought):
        return brought
    return [
        dataclasses.replace(stages, **OF_ROUNDS)  # type: ignore[arg-type]
        if stages.decode == "every" and stages.score is not None
        else stages
        for stages in brought
    ]


def _check_observed(stages: Stages) -> None:
    """Raises IllegalComposition for stages that read what is not there when they run."""
    if stages.decode == "once" and window_of(stages.needs) > 1:
        raise IllegalComposition(
            "compression at the first generated token sees the query of that token alone, and "
            f"{window_of(stages.needs)} queries are needed: choose a method that compresses at the "
            "prompt's end, such as simlayerkv:when=last_query"
        )
    if stages.decode == "every" and stages.runs_own_forwards:
        raise IllegalComposition(
            "forwards of its own run when a prompt ends, not while an answer is generated: "
            "leave every out, or choose another method that scores"
        )


def _check_one_by_one(stages: Stages) -> None:
    """Raises IllegalComposition for stages that cannot evict while tokens come one by one."""
    per_head = getattr(stages.allocate, "per_head", False)
    held = stages.decode == "every" and getattr(stages.allocate, "in_rounds", False)
    if stages.evicts_while_decoding and per_head and not held:
        raise IllegalComposition(
            "an allocation per head is made when a prefill ends, so it does not go with a method "
            "that evicts while decoding: choose decode=append where it is offered"
        )
    if stages.sizes == "again" and per_head:
        raise IllegalComposition(
            "sizes=again shares a layer's size among its heads, whose sizes another method gives: "
            "leave sizes=again out"
        )
    alone = stages.encode is None or (stages.decode == "every" and stages.encode.standalone)
    if stages.evicts_while_decoding and not alone:
        raise IllegalComposition(
            "encoded entries cannot be evicted one by one, so an encoding cannot follow a "
            "method that evicts while decoding: choose decode=append where it is offered"
        )
    if stages.decode == "hold" and stages.heads is not None:
        raise IllegalComposition(
            "budgets per head are set when a prefill ends, so they do not go with a method "
            "that evicts while decoding: choose decode=append where it is offered"
        )
    if stages.decode == "hold" and stages.select is not None:
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
    if stages.positions == "consecutive" and stages.decode == "hold":
        raise IllegalComposition(
            "consecutive positions would rotate all kept keys at every step of a method that "
            "evicts while decoding: choose decode=append where it is offered"
        )
