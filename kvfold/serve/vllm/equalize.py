# SPDX-License-Identifier: Apache-2.0
"""Equal counts: a page of vLLM spans all heads, and a request has one length in all layers.

Shorter heads cannot be filled up: a softmax has no entry that weighs nothing. So every head gives
as many as the shortest one keeps. Files hold no scores, as these end with the turn in which they
were made; a head gives the tokens that most heads keep, forced ones and sinks first among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.contexts.files.format import ContextFile, Header
from kvfold.errors import KvfoldError
from kvfold.methods.stages.select.top import top

# The part of the kept entries that must remain: at 0.6 answers are lost that at 0.8 are not.
LEAST = 0.75


@dataclass(frozen=True)
class Level:
    """The positions that a context takes, and which part of the entries in the file is lost.

    `layers` are the entries of each head of each layer; those of a layer that has fewer than
    `count` stand for the last positions.
    """

    count: int
    lost: float
    layers: tuple[int, ...]

    @classmethod
    def of(cls, header: Header) -> Level:
        """Equally many everywhere; raises KvfoldError where too much would be lost."""
        count = min(count for layer in header.layers for count in layer.kept)
        return cls.checked(header, count, (count,) * len(header.layers))

    @classmethod
    def checked(cls, header: Header, count: int, layers: tuple[int, ...]) -> Level:
        """The level with these sizes; raises KvfoldError where too much would be lost."""
        counts = [count for layer in header.layers for count in layer.kept]
        pairs = zip(layers, header.layers, strict=True)
        remaining = sum(size * len(part.kept) for size, part in pairs) / max(1, sum(counts))
        if min(layers) == 0 or remaining < LEAST:
            raise KvfoldError(
                f"heads keep {min(counts)} to {max(counts)} entries, and vLLM holds equally many "
                f"of each head and layer: {1 - remaining:.0%} of them would be lost; compress the "
                "document with a method that keeps equally many, such as snapkv or "
                "kvzip:level=uniform"
            )
        return cls(count, 1 - remaining, layers)


def votes(file: ContextFile) -> Tensor:
    """How many heads, of all layers, keep each token of the document `[N]`."""
    kept = torch.zeros(file.header.seen)
    for part in file.header.layers:
        name = "positions" if part.store == "dense" else "columns"
        if name not in part.by_head:
            kept += len(part.kept)
            continue
        for head in range(len(part.kept)):
            at = file.tensor(f"layers.{part.index}.{name}.{head}").long()
            kept[at[at >= 0]] += 1
        kept[part.first_new : part.first_new + part.new] += len(part.kept)
    return kept


def voted(kept: Tensor, places: Tensor, count: int) -> Tensor:
    """The `count` slots `[H, count]`, ascending, whose tokens have most votes `kept [N]`.

    `places [H, T]` number the document's tokens, −1 for holes.
    """
    scores = kept[places.clamp(min=0)].masked_fill(places < 0, -1)
    return top(scores[None], torch.tensor([count]))[0]
