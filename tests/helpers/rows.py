# SPDX-License-Identifier: Apache-2.0
"""Rows of random entries, whose heads lose some and gain others in rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.policies import Policy, Prefill, Rope
from kvfold.policies.row_policy import StoredRow

SIZE = 8


@dataclass
class RandomRow:
    """A row of `seen` tokens; each layer and head holds those in `tokens`."""

    keys: Tensor  # [L, H, T, D], of all tokens that there will be
    values: Tensor
    queries: Tensor  # [L, 2·H, T, D]
    tokens: list[list[Tensor]]
    seen: int

    @classmethod
    def of(cls, layers: int, heads: int, tokens: int, most: int, seed: int) -> RandomRow:
        """A row that has read `tokens` of its `most` tokens."""
        draw = torch.Generator().manual_seed(seed)
        keys, values = torch.randn(2, layers, heads, most, SIZE, generator=draw)
        queries = torch.randn(layers, 2 * heads, most, SIZE, generator=draw)
        every = [[torch.arange(tokens) for _ in range(heads)] for _ in range(layers)]
        return cls(keys, values, queries, every, tokens)

    def last_queries(self, policy: Policy) -> Tensor | None:
        """Those that a policy reads, of each layer."""
        wanted = policy.needs.queries
        first = 0 if wanted == "all" else max(0, self.seen - wanted)
        return self.queries[:, :, first : self.seen] if wanted else None

    def prefill(self, policy: Policy) -> Prefill:
        """What a policy reads of the prompt."""
        return Prefill(
            self.keys[:, :, : self.seen],
            self.values[:, :, : self.seen],
            self.last_queries(policy),
            rope=Rope.plain(SIZE) if policy.needs.rope else None,
        )

    def stored(self, policy: Policy) -> StoredRow:
        """What a policy reads in a round."""
        keys, values = (
            [
                [rows[at] for rows, at in zip(*pair, strict=True)]
                for pair in zip(of, self.tokens, strict=True)
            ]
            for of in (self.keys, self.values)
        )
        return StoredRow(keys, values, self.tokens, self.seen, self.last_queries(policy))

    def keep(self, slots: Sequence[Sequence[Tensor]]) -> None:
        """Leaves the entries at these slots of each head."""
        self.tokens = [
            [tokens[at] for tokens, at in zip(*pair, strict=True)]
            for pair in zip(self.tokens, slots, strict=True)
        ]

    def read(self, count: int) -> None:
        """Appends so many tokens to every head."""
        new = torch.arange(self.seen, self.seen + count)
        self.tokens = [[torch.cat([head, new]) for head in layer] for layer in self.tokens]
        self.seen += count

    def blocks(self, block: int, ranks: int = 1) -> int:
        """Blocks that hold the pages of all layers, without the last, unfilled block.

        Of the rank that has most, where `ranks` share the heads.
        """
        rest, each = self.seen % block, len(self.tokens[0]) // ranks
        pages = [
            sum(
                (len(head) - rest) // block
                for of in self.tokens
                for head in of[first : first + each]
            )
            for first in range(0, ranks * each, each)
        ]
        return -(-max(pages) // (len(self.tokens) * each))
