# SPDX-License-Identifier: Apache-2.0
"""Inputs and results of merge stages: a layer's eviction, and changes of its kept entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvfold.store.entry_norms import On


@dataclass(frozen=True)
class Eviction:
    """A layer's entries before an eviction, and the slots of those that stay."""

    keys: Tensor  # [B, H, T, D]
    values: Tensor  # [B, H, T, Dv]
    positions: Tensor  # [B, H, T], −1 for padding
    slots: Tensor  # [B, H, K] of the entries that stay, ascending, −1 for a hole
    column_sums: Tensor | None = None  # [B, H, T]; None unless the method observes them
    state: Tensor | None = None  # [B, H], float32, returned by the last merge; None at first
    seed: int = 0  # of this eviction's random draws


@dataclass(frozen=True)
class Leaving:
    """A layer's entries in a decode eviction, which evicts one entry of each head."""

    keys: Tensor  # [B, H, T, D]
    values: Tensor  # [B, H, T, Dv]
    hidden: Tensor  # [B, H, T], −∞ at holes and at `slot`, 0 elsewhere
    slot: Tensor  # [B, H, 1] of the evicted entry
    state: Tensor | None = None  # [B, H], as in an `Eviction`
    norms: Tensor | None = None  # [B, H, T], float32, of keys or values, by `Merge.norms`
    products: Tensor | None = None  # [B, H, T], of all keys with the evicted one, or None


@dataclass(frozen=True)
class Change:
    """New content of one kept entry of each head."""

    slot: Tensor  # [B, H, 1], among the entries before the eviction
    keys: Tensor  # [B, H, 1, D]
    values: Tensor  # [B, H, 1, Dv]
    state: Tensor | None  # [B, H], as in an `Eviction`
    norms: Tensor | None = None  # [B, H, 1] of the new content, if all norms were given


# Eviction → kept keys [B, H, K, D], kept values [B, H, K, Dv], state [B, H] or None
MergeStage = Callable[[Eviction], tuple[Tensor, Tensor, Tensor | None]]
# Decode evictions of layers whose entries have one shape → a change for each layer
MergeOneStage = Callable[[Sequence[Leaving]], list[Change]]


@dataclass(frozen=True)
class MergeStages:
    """A merge stage: of `all` that leave at once, and of `one` entry that decode eviction evicts.

    One None: decode eviction then merges as for many. `norms` of keys or values are for `one`.
    """

    all: MergeStage
    one: MergeOneStage | None = None
    norms: On | None = None

    def __call__(self, eviction: Eviction) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `all`."""
        return self.all(eviction)
