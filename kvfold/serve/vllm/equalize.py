# SPDX-License-Identifier: Apache-2.0
"""Equal entry counts over heads and layers, which vLLM's pages need.

A page of vLLM spans all KV heads of a layer, and a request has one length in all layers. Shorter
heads cannot be padded, as every entry has a weight in the softmax; so all heads are cut to the
shortest one. Context files hold no scores. Each head keeps the tokens that most heads keep, which
puts sinks and other forced tokens first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.contexts.files.format import ContextFile
from kvfold.contexts.files.header import Header
from kvfold.errors import KvfoldError
from kvfold.methods.stages.select.top import top

# Fraction of the kept entries that must remain: 0.8 preserves answers that 0.6 loses.
LEAST = 0.75


class UnevenContext(KvfoldError):
    """A context whose heads or layers keep numbers of entries that differ too much for pages."""


@dataclass(frozen=True)
class EntryCounts:
    """Entry counts of a context in vLLM.

    Args:
        count: M, positions that the context takes.
        lost: fraction of the file's entries that are dropped.
        layers: entries per KV head, layer by layer; fewer than `count` are at the last positions.
    """

    count: int
    lost: float
    layers: tuple[int, ...]

    @classmethod
    def of(cls, header: Header) -> EntryCounts:
        """The same count in every layer and head; raises UnevenContext if that loses too much."""
        count = min(count for layer in header.layers for count in layer.kept)
        return cls.checked(header, count, (count,) * len(header.layers))

    @classmethod
    def checked(cls, header: Header, count: int, layers: tuple[int, ...]) -> EntryCounts:
        """These counts; raises UnevenContext if they lose too much, or a layer had no entries."""
        counts = [count for layer in header.layers for count in layer.kept]
        pairs = zip(layers, header.layers, strict=True)
        remaining = sum(size * len(part.kept) for size, part in pairs) / max(1, sum(counts))
        if min(layers) == 0 or remaining < LEAST:
            raise UnevenContext(
                f"heads keep {min(counts)} to {max(counts)} entries, and vLLM holds equally many "
                f"of each head and layer: {1 - remaining:.0%} of them would be lost"
            )
        return cls(count, 1 - remaining, layers)


def votes(file: ContextFile) -> Tensor:
    """Number of heads, over all layers, that keep each token of the document: float32 `[N]`."""
    kept = torch.zeros(file.header.seen, dtype=torch.float32)
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


def voted(kept: Tensor, positions: Tensor, count: int) -> Tensor:
    """Indices `[H, count]`, ascending, of the entries whose tokens have most votes `kept [N]`.

    `positions [H, T]` are the entries' token numbers in the document, −1 for holes.
    """
    scores = kept[positions.clamp(min=0)].masked_fill(positions < 0, -1)
    return top(scores[None], torch.tensor([count]))[0]
