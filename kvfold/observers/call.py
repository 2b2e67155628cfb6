# SPDX-License-Identifier: Apache-2.0
"""One attention call: its inputs and its observations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.kernels.logits import LogitOptions


class PredictedEviction(NamedTuple):
    """The slot expected to leave every head, and dot products `[B, H, T]` of all keys with its key.

    Computed in the same matmul as the logits; D2O compares the evicted key with all others.
    """

    slot: int
    products: Tensor


class AttentionCall(NamedTuple):  # made in every layer of every step
    """Inputs of one attention call, and the observations that the method asked for.

    Observations are None unless the method needs them.
    """

    query: Tensor  # [B, Hq, S, D]
    key: Tensor  # [B, H, T, D]
    value: Tensor  # [B, H, T, Dv]
    logits: LogitOptions
    row: Tensor | None = None  # [B, Hq, 1, T], weights of a single query
    sums: Tensor | None = None  # [B, H, T], column sums
    squares: Tensor | None = None  # [B, H, T], column sums of squares
    maxima: Tensor | None = None  # [B, H, T], column maxima
    predicted: PredictedEviction | None = None
    autocast: torch.dtype | None = None  # of the torch.autocast that stock attention runs under
