# SPDX-License-Identifier: Apache-2.0
"""Decode attention over raw segments with torch's own `varlen_attn`, on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn
except ImportError:  # torch before 2.10
    AuxRequest = varlen_attn = None  # type: ignore[assignment, misc]


def attend_to_rows_varlen(
    query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention output `[R, G, D]` and log-sum-exp `[R, G]`, float32, of R segments.

    query `[R, G, D]`, keys and values `[n, D]` in half precision on a GPU, D a multiple of 8.
    Segment i is the rows from `starts[i]` to `starts[i + 1] − 1`; starts `[R + 1]`, int32. The
    longest segment has `longest` entries. An empty segment gives 0 and −inf.
    """
    segments = query.shape[0]
    # To varlen_attn a segment is a sequence: one query with G heads, keys with one head.
    one_each = torch.arange(segments + 1, dtype=starts.dtype, device=starts.device)
    out, lse = varlen_attn(
        query.contiguous(),
        keys[:, None],
        values[:, None],
        one_each,
        starts,
        1,
        longest,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        enable_gqa=True,
    )
    # Torch documents a log-sum-exp [R, G] but returns [G, R], with +inf for empty segments.
    empty = (starts.diff() == 0)[:, None]
    return out.masked_fill(empty[..., None], 0.0), lse.T.masked_fill(empty, -float("inf"))
