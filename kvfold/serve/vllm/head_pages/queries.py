# SPDX-License-Identifier: Apache-2.0
"""Queries of a prompt's last tokens, kept as they pass through vLLM's attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class QueryTail:
    """Queries of the last `count` tokens that a request has read, of each layer."""

    def __init__(self, layers: int, count: int) -> None:
        self.count = count
        self._of_layers: list[Tensor | None] = [None] * layers

    def read(self, layer: int, queries: Tensor) -> None:
        """Notes `queries [n, Hq, D]` of the next tokens."""
        before = self._of_layers[layer]
        kept = queries[-self.count :]
        if before is not None and len(kept) < self.count:
            kept = torch.cat([before[len(kept) - self.count :], kept])
        # vLLM's own buffer is written anew in the next step.
        self._of_layers[layer] = kept if kept._base is None else kept.clone()

    def stacked(self) -> list[Tensor]:
        """Queries `[Hq, W, D]` of each layer."""
        return [of.transpose(0, 1) for of in self._of_layers if of is not None]


# Of the running step, by the block that their request writes into, as `RUNNING` of `layout.py`.
WATCHED: dict[int, QueryTail] = {}


def watched_rows(blocks: Sequence[int], starts: Sequence[int]) -> list[tuple[QueryTail, slice]]:
    """Who reads which tokens of a step; row r writes into `blocks[r]`, from `starts[r]` on."""
    found = []
    for row, block in enumerate(blocks):
        if block in WATCHED:
            found.append((WATCHED[block], slice(starts[row], starts[row + 1])))
    return found
