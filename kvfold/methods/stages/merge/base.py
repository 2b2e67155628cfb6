# SPDX-License-Identifier: Apache-2.0
"""What a merging gets to see of one layer's eviction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Eviction:
    """Entries before the eviction, and which of them stay.

    keys `[B, H, T, D]`, values `[B, H, T, Dv]`; positions `[B, H, T]`, −1 for padding; slots
    `[B, H, K]` of the entries that stay, ascending, −1 for a hole; column sums `[B, H, T]` where
    the method observes them; `state [B, H]` float32, what this merging returned the last
    time, None at first; seed of this draw.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    slots: Tensor
    column_sums: Tensor | None = None
    state: Tensor | None = None
    seed: int = 0


@dataclass(frozen=True)
class Leaving:
    """The one entry of each head that leaves after a generated token, at `slot [B, H, 1]`.

    hidden `[B, H, T]` is −∞ there and where entries left before, 0 elsewhere. norms `[B, H, T]`,
    float32, are those of the keys or values where the method needs them, and products `[B, H, T]`
    those of the keys with the one that leaves: None where nobody has them. Everything else is as
    in an `Eviction`.
    """

    keys: Tensor
    values: Tensor
    hidden: Tensor
    slot: Tensor
    state: Tensor | None = None
    norms: Tensor | None = None
    products: Tensor | None = None


@dataclass(frozen=True)
class Change:
    """What one kept entry of each head turns into: keys `[B, H, 1, D]` and values `[B, H, 1, Dv]`.

    At `slot [B, H, 1]` of the entries before the eviction; `state` as for an `Eviction`; norms
    `[B, H, 1]` of what changed where those of all entries were given.
    """

    slot: Tensor
    keys: Tensor
    values: Tensor
    state: Tensor | None
    norms: Tensor | None = None


# Eviction → kept keys [B, H, K, D], kept values [B, H, K, Dv], state [B, H] or None
MergeStage = Callable[[Eviction], tuple[Tensor, Tensor, Tensor | None]]
# What leaves layers whose single entries have one shape → a change for each of them
MergeOneStage = Callable[[Sequence[Leaving]], list[Change]]
