# SPDX-License-Identifier: Apache-2.0
"""Eviction while decoding, and positions: choices, and those that contradict one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from kvfold.errors import IllegalComposition

if TYPE_CHECKING:
    from kvfold.methods.base import Stages

Decode = Literal["append", "hold", "every", "once"]
Prompt = Literal["counted", "kept"]
Positions = Literal["original", "reindex", "consecutive"]
CHOICES = {"decode": Decode, "prompt": Prompt, "positions": Positions}


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
    per_head = getattr(stages.allocate, "per_head", False)
    held = rounds and getattr(stages.allocate, "in_rounds", False)
    if stages.evicts_while_decoding and per_head and not held:
        raise IllegalComposition(
            "an allocation per head is made when a prefill ends, so it does not go with a method "
            "that evicts while decoding: choose decode=append where it is offered"
        )
    _check_positions(stages)


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
