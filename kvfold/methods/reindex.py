# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar

from kvfold.methods.base import AddOn, Stages, register


@register("reindex", formula="position of a head's entry i of m = n − m + i,  when entries leave")
@dataclass(frozen=True)
class Reindex(AddOn):
    """Moves the tokens that another method keeps to consecutive positions: "snapkv + reindex".

    Whenever entries leave, the keys that a head keeps are rotated up, in float32, so that they end
    right before the next token, without gaps. Later tokens keep their positions. That is the same
    as numbering the kept tokens from 0, for each head by itself, as RoPE is relative. Questions are
    then no farther from an entry than a head's size.

    With `every` keys move again in each round, and in 16 bits each move rounds them; queries of the
    window that are older than the last round score keys that have moved since. `streaming_llm`
    moves its sinks at every step. Refused for keys that are encoded, and for models whose keys
    cannot be rotated for certain.
    Source: Corallo and Papotti, arXiv 2408.00167; NVIDIA/kvpress `key_rerotation_press.py`.
    """

    beside: ClassVar[str] = "snapkv"
    by_head: ClassVar[bool] = True

    def brings(self) -> Stages:
        return Stages(positions="consecutive")
