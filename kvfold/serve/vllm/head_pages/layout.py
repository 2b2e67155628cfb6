# SPDX-License-Identifier: Apache-2.0
"""How many pages each KV head of each layer has, and where they lie in vLLM's blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Slabs:
    """vLLM's cache: one tensor of pages of single heads, a slab of `blocks · heads` each layer.

    So a page of any layer holds entries of any other as well.
    """

    layers: int
    blocks: int
    heads: int

    @classmethod
    def of(cls, layers: Mapping[int, Any]) -> Slabs:
        """Those of vLLM's attention `layers`, by index; KvfoldError if they lie otherwise.

        Their caches are `[blocks, H, block, …]`.
        """
        caches = [layers[number].kv_cache for number in range(len(layers))]
        found = cls(len(caches), *caches[0].shape[:2])
        start, step = caches[0].data_ptr(), caches[0].nbytes
        if not all(
            cache.is_contiguous() and cache.data_ptr() == start + layer * step
            for layer, cache in enumerate(caches)
        ):
            raise KvfoldError("vLLM keeps its layers in a way that kvfold does not know")
        return found

    def pages(self, blocks: Sequence[int]) -> Tensor:
        """Numbers of all pages of vLLM's `blocks`, block after block, int32 `[n·L·H]`."""
        of_layers = torch.arange(self.layers)[:, None] * self.blocks
        rows = of_layers + torch.tensor(blocks, dtype=torch.int64)[:, None, None]  # [n, L, 1]
        return (rows * self.heads + torch.arange(self.heads)).flatten().int()


def all_pages(kv_cache: Tensor) -> Tensor:
    """Pages of single heads of all layers, `[pages, 1, block, …]`.

    `kv_cache [blocks, H, block, …]` is one layer's, a part of the tensor of `Slabs`.
    """
    page = kv_cache[0, 0].numel()
    count = kv_cache.untyped_storage().nbytes() // (page * kv_cache.itemsize)
    shape = kv_cache.shape[2:]
    return kv_cache.as_strided((count, 1, *shape), (page, page, shape[1], 1), 0)


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
        return self.of_heads(share(len(self.of_layers[0]), rank, ranks))

    def of_heads(self, heads: slice) -> HeadPages:
        """The pages of some heads."""
        return HeadPages(tuple(layer[heads] for layer in self.of_layers))

    def blocks(self, ranks: int = 1) -> int:
        """Blocks of vLLM that hold them, the same on all ranks: those of the largest share."""
        of_ranks = [self.of_rank(rank, ranks).of_layers for rank in range(ranks)]
        in_block = len(of_ranks[0]) * len(of_ranks[0][0])
        return max(-(-sum(map(sum, own)) // in_block) for own in of_ranks)


@dataclass(frozen=True, eq=False)  # a request's own, known by its identity
class Layout:
    """Where a request's own pages lie, and what they stand in for.

    The pages of all heads, layer after layer, follow one another in `numbers`.

    Args:
        numbers: pages of single heads in vLLM's cache, by `Slabs`, int32 `[n·L·H]`.
        firsts, counts: index of each head's first page in `numbers`, and how many it has, int32
            `[L, H]`.
        replaced: leading blocks of the request, in vLLM's table, that are not read.
    """

    numbers: Tensor
    firsts: Tensor
    counts: Tensor
    replaced: int

    @classmethod
    def of(cls, pages: HeadPages, blocks: Sequence[int], replaced: int, slabs: Slabs) -> Layout:
        """The layout of `pages`, of one rank, in vLLM's `blocks`."""
        counts = torch.tensor(pages.of_layers, dtype=torch.int32)
        ends = counts.flatten().cumsum(0, dtype=torch.int32).view_as(counts)
        return cls(slabs.pages(blocks), ends - counts, counts, replaced)

    def pages(self, layer: int, first: int = 0) -> Tensor:
        """Numbers of a layer's pages, head after head, int32, without the `first` of all layers."""
        start = int(self.firsts[layer, 0])
        return self.numbers[max(start, first) : start + int(self.counts[layer].sum())]

    def slots(self, layer: int, block: int, first: int = 0) -> Tensor:
        """Slots of all entries of `pages`, in pages of `block` entries, int64."""
        pages = self.pages(layer, first).long()
        return (pages[:, None] * block + torch.arange(block)).flatten()


# Layouts of the running step, by the block that their request writes into: no other request writes
# there, and what vLLM tells its attention of a step names no requests. Set by the connector.
RUNNING: dict[int, Layout] = {}
