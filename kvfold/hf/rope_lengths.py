# SPDX-License-Identifier: Apache-2.0
"""RoPE whose frequencies follow the length of a text (dynamic NTK, LongRoPE).

A key keeps the rotation of the length at which it was read. Whole texts, pieces of them, later
turns and steps agree only where all of a cache's keys were read under the same frequencies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from kvfold.errors import UnsupportedModel


@dataclass(frozen=True)
class RopeLengths:
    """The lengths at which a model changes its rotary frequencies, in tokens."""

    name: str  # of the model's class
    switches: tuple[int, ...]  # the longest texts read by other frequencies than longer ones
    end: int | None  # the longest text before frequencies change with every token; None: never

    @classmethod
    def of(cls, model: Any) -> RopeLengths | None:
        """Those of a model; None if its frequencies never change."""
        config = model.config.get_text_config(decoder=True)
        switches, ends = set[int](), set[int]()
        for rope in rope_settings(config):
            if rope.get("rope_type") == "longrope":
                named = rope.get("original_max_position_embeddings")
                switches.add(named or config.original_max_position_embeddings)
            elif "dynamic" in str(rope.get("rope_type")):
                # A text of just the trained length keeps the frequencies that another one left.
                ends.add(config.max_position_embeddings - 1)
        if not switches and not ends:
            return None
        return cls(type(model).__name__, tuple(sorted(switches)), min(ends, default=None))

    def switch_before(self, total: int) -> int:
        """Tokens of the last switch that a text of `total` passes; 0 if it passes none."""
        return max((switch for switch in self.switches if switch < total), default=0)

    def check(self, seen: int, total: int, read_in: int) -> None:
        """Raises UnsupportedModel if a text of `total` tokens goes on from other frequencies.

        `seen` of its tokens were read before, in a text of `read_in`, and keep their rotation.
        """
        if self.end is not None and total > self.end:
            raise UnsupportedModel(
                f"{self.name} changes its rotary frequencies with every token from {self.end} on "
                f"(dynamic NTK), which keys in a cache do not follow: a text of {total} tokens "
                'is too long; shorten it, or load the model with rope_type "linear" or "yarn"'
            )
        if seen and self.changes_between(read_in, total):
            kind = "longer" if read_in > total else "shorter"
            raise UnsupportedModel(
                f"{self.name} changes its rotary frequencies past "
                f"{self.switch_before(max(read_in, total))} tokens: the {seen} tokens in the cache "
                f"were read by those of {kind} texts and do not go with a text of {total}; read "
                "the whole text into a new cache"
            )

    def changes_between(self, one: int, other: int) -> bool:
        """True if texts of these lengths are read by different frequencies."""
        return self.switch_before(one) != self.switch_before(other)


def rope_settings(config: Any) -> Iterator[dict[str, Any]]:
    """Settings of RoPE, of all layers or of each type of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    yield rope
    yield from (kind for kind in rope.values() if isinstance(kind, dict))


def serialize(model: Any) -> list[RemovableHandle]:
    """Handles of hooks that let one thread at a time rotate, where frequencies change.

    They lie in the module, where another thread's text would change them between two lines.
    """
    if RopeLengths.of(model) is None:
        return []
    lock = threading.RLock()

    def begin(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            lock.acquire()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            lock.release()

    rotary = [part for part in model.modules() if type(part).__name__.endswith("RotaryEmbedding")]
    handles = list[RemovableHandle]()
    for part in rotary:
        handles.append(part.register_forward_pre_hook(begin))
        handles.append(part.register_forward_hook(end, always_call=True))
    return handles
