# SPDX-License-Identifier: Apache-2.0
"""Norms of stored entries, for what compares them while they leave one by one."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvfold.store.growing import Growing

On = Literal["keys", "values"]  # what is compared


class Norms(Growing):
    """Norms `[B, H, T]` of keys or values, float32: reading all of these again takes longer."""

    def __init__(self, entries: Tensor) -> None:
        super().__init__(norms_of(entries))

    def follow(self, entries: Tensor) -> None:
        """Adds those of what is new in `entries [B, H, ≥ T, D]`."""
        if entries.shape[2] > self.length:
            self.append(norms_of(entries[:, :, self.length :]))

    def put(self, slot: Tensor, entries: Tensor) -> None:
        """Says that `entries [B, H, 1, D]` lie at `slot [B, H, 1]` now."""
        self._buffer.scatter_(2, slot, norms_of(entries))


def norms_of(entries: Tensor) -> Tensor:
    """Euclidean norms `[B, H, T]` of `entries [B, H, T, D]`, above 0 so that cosines are finite."""
    return torch.linalg.vector_norm(entries.float(), dim=-1).clamp_(min=1e-12)
