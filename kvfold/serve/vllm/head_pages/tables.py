# SPDX-License-Identifier: Apache-2.0
"""Page tables of a step in which each KV head of each request is a request of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.serve.vllm.head_pages.layout import Layout, Slabs

ROUNDED = 16  # columns of a table are a multiple, so that most blocks are added without a new one


class PageTables:
    """Tables of R requests, each with H heads, in L layers; kept until a request gets a block.

    `table [L, R·H, W]`, int32, holds numbers of pages of single heads, request after request;
    `added [L, R·H]`, int32, is what a head attends to beyond its request's length in vLLM, mostly
    negative. `alike [L]`: the first layer with the same numbers of entries.
    """

    def __init__(self, slabs: Slabs, block: int) -> None:
        layers = slabs.layers
        self.slabs, self.block = slabs, block
        self.table = torch.zeros(layers, 0, 0, dtype=torch.int32)
        self.added = torch.zeros(layers, 0, dtype=torch.int32)
        self.alike = list(range(layers))
        self._blocks = torch.zeros(0, 0, dtype=torch.int32)
        self._layouts: list[Layout | None] = []
        self._placed: Tensor | None = None  # the table on vLLM's device, until it changes

    def of_layer(self, layer: int, device: torch.device) -> Tensor:
        """The table of a layer `[R·H, W]` on a device."""
        if self._placed is None:
            self._placed = self.table.to(device)
        return self._placed[layer]

    def update(
        self, block_table: Tensor, lengths: Tensor, layouts: Sequence[Layout | None]
    ) -> None:
        """Makes the tables those of `block_table [R, P]` and `lengths [R]`; None: no own pages.

        Both are vLLM's: its blocks of each request, and the tokens that these hold.
        """
        used = (lengths + self.block - 1) // self.block
        width = int(used.max())
        blocks = block_table[: len(used), :width]
        blocks = blocks.masked_fill(torch.arange(width) >= used[:, None], 0)
        same = list(layouts) == self._layouts
        if same and torch.equal(blocks, self._blocks):
            return
        changed = self._changed(blocks) if same else torch.ones(len(used), dtype=torch.bool)
        self._blocks, self._used = blocks, used.long()
        if not same:
            self._layouts = list(layouts)
            self._count()
        self._fill(changed.nonzero()[:, 0])
        self._placed = None

    def _changed(self, blocks: Tensor) -> Tensor:
        """Requests `[R]`, bool, whose blocks are others than before."""
        before = self._blocks
        width = max(before.shape[1], blocks.shape[1])
        old, new = (
            torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in (before, blocks)
        )
        return (old != new).any(1)

    def _count(self) -> None:
        """Sets the numbers of own pages, and of entries that they add."""
        none = torch.zeros(self.slabs.layers, self.slabs.heads, dtype=torch.int32)
        counts = [none if own is None else own.counts for own in self._layouts]
        self._counts = torch.stack(counts, 1)  # [L, R, H]
        self._replaced = torch.tensor([own.replaced if own else 0 for own in self._layouts])
        added = (self._counts - self._replaced[:, None]) * self.block
        self.added = added.flatten(1).int()
        first: dict[bytes, int] = {}
        self.alike = [
            first.setdefault(row.numpy().tobytes(), i) for i, row in enumerate(self.added)
        ]

    def _fill(self, rows: Tensor) -> None:
        """Writes the tables of requests `rows`."""
        slabs, blocks = self.slabs, self._blocks[rows].long()
        counts, replaced = self._counts[:, rows].long(), self._replaced[rows]
        width = int((counts.amax((0, 2)) + self._used[rows] - replaced).max())
        self._widen(width)
        own = [self._layouts[row] for row in rows.tolist()]
        most = max([1, *(len(layout.numbers) for layout in own if layout)])
        numbers = torch.zeros(len(own), most, dtype=torch.int64)
        firsts = torch.zeros_like(counts)
        for i, layout in enumerate(own):
            if layout is not None:
                numbers[i, : len(layout.numbers)] = layout.numbers
                firsts[:, i] = layout.firsts
        place = torch.arange(self.table.shape[2])
        of_own = (firsts[..., None] + place).clamp(max=most - 1)  # [L, r, H, W]
        found = numbers[torch.arange(len(own))[:, None, None], of_own]
        of_blocks = (place - counts[..., None] + replaced[:, None, None]).clamp(
            0, blocks.shape[1] - 1
        )
        tail = blocks[torch.arange(len(own))[:, None, None], of_blocks]  # [L, r, H, W]
        tail += (torch.arange(slabs.layers) * slabs.blocks)[:, None, None, None]
        tail = tail * slabs.heads + torch.arange(slabs.heads)[:, None]
        filled = torch.where(place < counts[..., None], found, tail).int()
        self.table.unflatten(1, (-1, slabs.heads))[:, rows] = filled

    def _widen(self, width: int) -> None:
        """Makes room for so many columns, and for all requests."""
        rows = len(self._layouts) * self.slabs.heads
        if self.table.shape[1] == rows and self.table.shape[2] >= width:
            return
        columns = -(-max(width, self.table.shape[2]) // ROUNDED) * ROUNDED
        table = torch.zeros(self.slabs.layers, rows, columns, dtype=torch.int32)
        if self.table.shape[1] == rows:
            table[:, :, : self.table.shape[2]] = self.table
        self.table = table


def by_head(starts: Tensor, heads: int) -> tuple[Tensor, Tensor | None]:
    """Where the queries of each head begin `[R·H + 1]`, int32, and where each query goes.

    `starts [R + 1]` are where those of each request begin. The second, int64 `[T·H]`, is for
    queries `[T·H, …]` as the model gives them; None: they stay where they are.
    """
    counts = (starts[1:] - starts[:-1]).long()
    each = counts.repeat_interleave(heads)
    of_heads = torch.zeros(len(each) + 1, dtype=torch.int32)
    of_heads[1:] = each.cumsum(0)
    if int(counts.max()) == 1:
        return of_heads, None
    row = torch.arange(len(counts)).repeat_interleave(counts)
    inside = torch.arange(len(row)) - starts[:-1].long()[row]
    first = of_heads[:-1].long().view(-1, heads)[row]
    return of_heads, (first + inside[:, None]).flatten()
