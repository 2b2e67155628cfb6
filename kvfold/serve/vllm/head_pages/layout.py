# SPDX-License-Identifier: Apache-2.0
"""How many pages each KV head of each layer has, and where they lie in vLLM's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.errors import KvfoldError


def share(heads: int, rank: int, ranks: int) -> slice:
    """The KV heads of a tensor-parallel rank, split or replicated as vLLM does.

    Raises KvfoldError if neither number divides the other.
    """
    if heads % ranks == 0:
        each = heads // ranks
        return slice(rank * each, (rank + 1) * each)
    if ranks % heads == 0:
        head = rank * heads // ranks
        return slice(head, head + 1)
    raise KvfoldError(f"{heads} KV heads cannot be dealt out to {ranks} ranks")


def of_heads(kv_cache: Tensor) -> Tensor:
    """A layer's cache `[blocks, H, block, …]` as pages of heads, `[blocks·H, 1, block, …]`."""
    return kv_cache.view(-1, 1, *kv_cache.shape[2:])


@dataclass(frozen=True)
class HeadPages:
    """Numbers of pages: `of_layers[l][h]` of KV head h in layer l."""

    of_layers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, kept: Sequence[Sequence[int]], size: int) -> HeadPages | None:
        """Pages of `size` entries, by the entries that heads keep; None if some are not filled."""
        if any(count < 0 or count % size for layer in kept for count in layer):
            return None
        return cls(tuple(tuple(count // size for count in layer) for layer in kept))

    def of_rank(self, rank: int, ranks: int) -> HeadPages:
        """The pages of a tensor-parallel rank; raises KvfoldError as `share`."""
        heads = share(len(self.of_layers[0]), rank, ranks)
        return HeadPages(tuple(layer[heads] for layer in self.of_layers))

    def blocks(self, ranks: int = 1) -> int:
        """Blocks of vLLM, the same in all layers and ranks: those of the largest layer."""
        of_ranks = [self.of_rank(rank, ranks) for rank in range(ranks)]
        return max(-(-sum(layer) // len(layer)) for own in of_ranks for layer in own.of_layers)


@dataclass(frozen=True, eq=False)  # a request's own, known by its identity
class Layout:
    """Where a request's own pages lie, and what they stand in for.

    The pages of a layer's heads follow one another in `numbers`, the same for all layers.

    Args:
        numbers: pages of single heads, int32 `[n·H]`: number `block·H + h` in vLLM's cache.
        firsts, counts: index of each head's first page in `numbers`, and how many it has, int32
            `[L, H]`.
        replaced: leading blocks of the request, in vLLM's table, that are not read.
    """

    numbers: Tensor
    firsts: Tensor
    counts: Tensor
    replaced: int

    @classmethod
    def of(cls, pages: HeadPages, blocks: Sequence[int], replaced: int) -> Layout:
        """The layout of `pages`, of one rank, in vLLM's `blocks`."""
        counts = torch.tensor(pages.of_layers, dtype=torch.int32)
        heads = counts.shape[1]
        numbers = torch.tensor(blocks, dtype=torch.int32)[:, None] * heads + torch.arange(heads)
        firsts = counts.cumsum(1, dtype=torch.int32) - counts
        return cls(numbers.flatten().int(), firsts, counts, replaced)

    @property
    def blocks(self) -> int:
        """Blocks that hold the pages of the largest layer."""
        return -(-int(self.counts.sum(1).max()) // self.counts.shape[1])

    def pages(self, layer: int) -> Tensor:
        """Numbers of a layer's pages, head after head, int32."""
        return self.numbers[: int(self.counts[layer].sum())]

    def slots(self, layer: int, block: int) -> Tensor:
        """Slots of all entries of a layer's pages, head after head, int64."""
        return (self.pages(layer).long()[:, None] * block + torch.arange(block)).flatten()


# Layouts of the running step, by the block that their request writes into: no other request writes
# there, and what vLLM tells its attention of a step names no requests. Set by the connector.
RUNNING: dict[int, Layout] = {}
