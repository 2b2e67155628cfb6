# SPDX-License-Identifier: Apache-2.0
"""Norms of stored entries, for merges that compare entries at every decode eviction (D2O)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

On = Literal["keys", "values"]  # the half of an entry that is compared


def norms_of(entries: Tensor) -> Tensor:
    """Euclidean norms `[B, H, T]` of `entries [B, H, T, D]`, above 0 so that cosines are finite."""
    return torch.linalg.vector_norm(entries.float(), dim=-1).clamp_(min=1e-12)
