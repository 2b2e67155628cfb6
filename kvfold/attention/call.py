# SPDX-License-Identifier: Apache-2.0
"""One attention call: what went in, and what was observed of it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PredictedEviction(NamedTuple):
    """The slot expected to leave every head, and dot products `[B, H, T]` of all keys with its key.

    Computed in the same matmul as the logits; D2O compares the leaving key with all others.
    """

    slot: int
    products: Tensor


class AttentionCall(NamedTuple):  # made in every layer of every step
    """Inputs of one attention call, and the observations that the method asked for.

    query `[B, Hq, S, D]`; key and value `[B, H, T, D]`; scale of the logits; softcap; attention
    sinks `[Hq]`. Observed: the row `[B, Hq, 1, T]` of a single query; column sums, squares and
    maxima `[B, H, T]`; a predicted eviction. None where nobody asked.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    row: Tensor | None = None
    sums: Tensor | None = None
    squares: Tensor | None = None
    maxima: Tensor | None = None
    predicted: PredictedEviction | None = None
