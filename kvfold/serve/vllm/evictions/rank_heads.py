# SPDX-License-Identifier: Apache-2.0
"""Heads of all tensor-parallel ranks: each rank chooses among them all, and so as the others do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvfold.serve.vllm.head_pages.layout import share


class RankHeads:
    """Rank `rank` of `size`, which shares `heads` KV heads with the others as vLLM deals them out.

    `gather` joins tensors of one shape of all ranks along the first dimension, in their order.
    """

    def __init__(
        self, rank: int, size: int, heads: int, gather: Callable[[Tensor], Tensor]
    ) -> None:
        self.size, self.count, self._gather = size, heads, gather
        self._shares = [range(heads)[share(heads, each, size)] for each in range(size)]
        self.own = share(heads, rank, size)
        # A head that several ranks hold comes from the first one.
        self._from = [
            next(r for r in range(size) if head in self._shares[r]) for head in range(heads)
        ]

    def heads(self, own: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """Rows `[n, D]` of all heads, `lengths` of them, from those of this rank's heads."""
        if self.size == 1:
            return list(own)
        most = max(sum(lengths[head] for head in held) for held in self._shares)
        rows = torch.cat(list(own))
        padded = rows.new_zeros(most, rows.shape[1])
        padded[: len(rows)] = rows
        of_ranks = self._gather(padded).view(self.size, most, -1)
        found = []
        for head, rank in enumerate(self._from):
            held = self._shares[rank]
            first = sum(lengths[before] for before in held if before < head)
            found.append(of_ranks[rank, first : first + lengths[head]])
        return found

    def queries(self, own: Tensor) -> Tensor:
        """Queries `[Hq, W, D]` of all query heads, from those of this rank."""
        return own if self.size == 1 else self._gather(own.contiguous())
