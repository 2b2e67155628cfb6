# SPDX-License-Identifier: Apache-2.0
"""Which tokens a method still holds once a text is compressed: by how many heads, in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.budget import Budget
from kvfold.inspect.document import Document, Needle
from kvfold.inspect.kept import Positions
from kvfold.methods.base import parse


@dataclass(frozen=True)
class Holding:
    """What `method` kept of N tokens: `counts [L, N]` KV heads hold each, of `heads [L]`."""

    method: str
    budget: str
    counts: Tensor
    heads: tuple[int, ...]
    nbytes: int
    nbytes_full: int

    @property
    def shares(self) -> Tensor:
        """The part of a layer's KV heads that hold each token `[L, N]`."""
        return self.counts / torch.tensor(self.heads)[:, None]

    @property
    def kept(self) -> float:
        """The part of all entries that is stored."""
        return int(self.counts.sum()) / (sum(self.heads) * self.counts.shape[1])

    def kept_of(self, needles: Sequence[Needle]) -> float:
        """The part of the entries in `needles`, of which there is at least one, that is stored."""
        inside = torch.cat([self.counts[:, n.start : n.stop] for n in needles], 1)
        return int(inside.sum()) / (sum(self.heads) * inside.shape[1])


def hold(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    document: Document,
    method: str,
    budget: Budget,
    seed: int = 0,
) -> Holding:
    """Compresses `document` by `method`, to `budget` where it takes one; raises as `compress`."""
    limit = budget if parse(method).takes_budget else None
    context = kvfold.compress(
        model,
        tokenizer,
        document.text,
        method,
        limit,
        seed=seed,
        special_tokens=document.special_tokens,
        allow_longer=True,  # whoever made the document has looked
    )
    stats = context.stats()
    positions = [context.cache.positions(i) for i in range(len(stats.kept))]
    heads = tuple(len(layer[0]) for layer in positions)
    counts = heads_per_token(positions, document.ids.shape[1])
    return Holding(method, stats.budget, counts, heads, stats.nbytes, stats.nbytes_full)


def heads_per_token(positions: Positions, tokens: int) -> Tensor:
    """How many KV heads of each layer hold each token, `[L, N]`; of the first row."""
    rows = [torch.cat(list(layer[0])).cpu().bincount(minlength=tokens) for layer in positions]
    return torch.stack(rows)
