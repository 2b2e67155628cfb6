# SPDX-License-Identifier: Apache-2.0
"""A query per segment through torch's own kernel for sequences of different lengths."""

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
    """Attention output `[S, G, D]` and the logits' log-sum-exp `[S, G]`, float32.

    query `[S, G, D]`, keys and values `[N, D]` in half precision on a GPU, D a multiple of 8.
    Segment s, of at most `longest` entries, is the rows from `starts[s]` to `starts[s + 1] − 1`,
    int32. An empty segment gives 0 and −inf.
    """
    segments = query.shape[0]
    # A segment is a sequence of one query with G heads, over keys with one head.
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
    # Torch documents its log-sum-exp as [S, G], and returns [G, S]; it calls nothing +inf.
    empty = (starts.diff() == 0)[:, None]
    return out.masked_fill(empty[..., None], 0.0), lse.T.masked_fill(empty, -float("inf"))
