# SPDX-License-Identifier: Apache-2.0
"""Attention to segments of different lengths (varlen), without padding.

Reference: `reference.attend_with_column_sums` on each segment alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from kvfold.kernels.dispatch import SegmentPath, segments_path
from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.segments import blocks, each, even, packed, per_token, rows
from kvfold.kernels.views import RaggedView

PATHS: dict[SegmentPath, Callable[[Tensor, RaggedView, Tensor | None, LogitOptions], Tensor]] = {
    "blocks": blocks.attend,
    "each": each.attend,
    "even": even.attend,
    "packed": packed.attend,
    "per token": per_token.attend,
    "rows": rows.attend,
}


def attend_to_segments(
    query: Tensor, stored: RaggedView, mask: Tensor | None, **options: Unpack[LogitOptions]
) -> Tensor:
    """Attention output `[B, Hq, S, Dv]` of `query [B, Hq, S, D]`.

    `mask`, bool or additive `[B, 1 or Hq, S, n]`, covers the last n entries of every segment. None:
    causal, the queries being the last S entries of every segment. Rows that see nothing are 0.
    Entries with a bias take plain torch, on a GPU too.
    """
    if mask is not None and query.shape[2] == 1:
        shown = mask if mask.dtype == torch.bool else mask == 0
        mask = None if bool(shown.all()) else mask
    path = segments_path(query, stored, masked=mask is not None, **options)
    return PATHS[path](query, stored, mask, options)
