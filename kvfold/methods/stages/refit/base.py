# SPDX-License-Identifier: Apache-2.0
"""Input and result of a refit stage: entries with the kept ones named, and reference queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvfold.observers.references import References


@dataclass(frozen=True)
class Compaction:
    """A layer's entries before an eviction, the slots of those that stay, and reference queries."""

    keys: Tensor  # [B, H, T, D]
    values: Tensor  # [B, H, T, Dv]
    bias: Tensor | None  # [B, H, T]
    block: Tensor  # [B, H, T], False at padding and at entries that are kept as they are
    slots: Tensor  # [B, H, K], ascending, −1 for a hole
    references: References
    scale: float
    softcap: float | None = None


@dataclass(frozen=True)
class Refitted:
    """New values `[B, H, K, Dv]` of the kept entries, and their bias `[B, H, K]` if it changes.

    `report [B, 4]`: relative error of the attention output on held-out reference queries, with the
    kept entries as they were, and refitted; heads whose values a guard has held back; entries
    without weight.
    """

    values: Tensor
    bias: Tensor | None
    report: Tensor


class Refit(Protocol):
    """A refit stage."""

    @property
    def gives_bias(self) -> bool:
        """True if entries get a bias, which takes 4 bytes each."""

    def __call__(self, given: Compaction) -> Refitted:
        """New values and biases of the kept entries."""
