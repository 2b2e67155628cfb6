# SPDX-License-Identifier: Apache-2.0
"""When a layer compresses, and to what."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.budget import Budget
from kvfold.method import Stages
from kvfold.store.dense import DenseStore


@dataclass
class Turn:
    """Where the conversation stands; shared by all layers of a cache.

    `until` is the number of tokens at which a turn that is read piece by piece ends.
    """

    reading: bool = False
    frozen: bool = False
    until: int = 0

    def ends(self, seen: int, new: int) -> bool:
        """Whether a forward of `new` tokens that reached `seen` completes a turn."""
        if self.goes_on(seen):
            return False
        return new > 1 or seen - new < self.until

    def goes_on(self, seen: int) -> bool:
        """Whether more pieces of this turn are to come after `seen` tokens."""
        return self.reading or seen < self.until


@dataclass(frozen=True)
class Plan:
    """What a layer must know of its cache: method, budget, place, and the seed of random scores."""

    stages: Stages
    budget: Budget | None
    layer: int
    layers: int
    seed: int

    def counts(self, seen: Tensor, store: DenseStore) -> Tensor:
        """Entries per KV head that each row may keep `[B]`, from its tokens seen `[B]`."""
        assert self.budget is not None and self.stages.allocate is not None
        keys, values = store.keys, store.values
        position = 4
        entry = (keys.shape[-1] + values.shape[-1]) * keys.element_size() + position
        per_row = []
        for tokens in seen.tolist():
            total = self.budget.per_layer(tokens, entry, self.layers, keys.shape[1], len(seen))
            per_row.append(self.stages.allocate(total, tokens, self.layers)[self.layer])
        return torch.tensor(per_row, device=keys.device)
