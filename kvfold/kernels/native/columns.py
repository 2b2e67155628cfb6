# SPDX-License-Identifier: Apache-2.0
"""Causal attention of many queries in C++, and what entries receive of it.

Reference: `reference.attend_with_moments` and `reference.attend_with_column_maxima`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvfold.kernels.native.library import call, note_operations
from kvfold.kernels.views import int64_of

SUMS, SQUARES, MAXIMA, MEAN_SQUARES = range(4)  # kinds, as of columns.cpp


@cache
def vector_width() -> int:
    """Numbers of a vector: values must be as wide, or several times. Needs the library."""
    return call("vector_width")


def is_causal(mask: Tensor) -> bool:
    """True if causality and padding alone hide entries by `mask [B or 1, Hq or 1, S, T]`.

    Padding is hidden from its own query, whose other entries are free, and from all after it.
    """
    queries, stored = mask.shape[2:]
    if mask.dtype != torch.bool or queries > stored:
        return False
    if not bool((mask[:, :, -1] == mask[:, :1, -1]).all()):
        return False
    mask = mask if mask.stride(3) == 1 else mask.contiguous()
    return all(
        call("is_causal", own.data_ptr(), own.stride(0), queries, stored) == 1
        for own in mask.flatten(0, 1)
    )


def column_moments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    counted: Tensor | None,
    squares: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `reference.attend_with_moments`, by an `is_causal` mask and in float32.

    Padding's outputs are 0. Squares are None without `squares`.
    """
    groups = query.shape[1] // key.shape[1]
    out, sums, found = _run(
        query, key, value, mask, kind=SQUARES if squares else SUMS, scale=scale, counted=counted
    )
    return out, sums / groups, None if found is None else found / groups**2


def column_maxima(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    scored: Tensor,
    counted: Tensor | None,
    row_weights: Tensor | None,
    column_weights: Tensor | None,
    rms: bool,
) -> tuple[Tensor, Tensor]:
    """As `reference.attend_with_column_maxima`, by an `is_causal` mask and in float32.

    Padding's outputs are 0. With `rms`, sums of squares.
    """
    out, maxima, _ = _run(
        query,
        key,
        value,
        mask,
        kind=MEAN_SQUARES if rms else MAXIMA,
        scale=scale,
        counted=counted,
        scored=scored,
        row_weights=row_weights,
        column_weights=column_weights,
    )
    return out, maxima


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    kind: int,
    scale: float,
    counted: Tensor | None,
    scored: Tensor | None = None,
    row_weights: Tensor | None = None,
    column_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output `[B, Hq, S, Dv]` and what entries receive, `[B, H, T]` once or twice."""
    (batch, query_heads, queries, size), (_, heads, stored, _) = query.shape, key.shape
    groups, value_size = query_heads // heads, value.shape[3]
    out = query.new_empty(batch, queries, query_heads, value_size)
    first = query.new_zeros(batch, heads, stored)
    second = torch.zeros_like(first) if kind == SQUARES else None
    rows = [x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value)]
    of_rows, of_entries = (batch, queries), (batch, query_heads, stored)
    weights = [
        None if x is None else x.float().expand(shape).contiguous()
        for x, shape in ((row_weights, of_rows), (column_weights, of_entries))
    ]
    shown = None if mask is None or bool(mask[:, :, -1].all()) else mask[:, 0, -1]
    chosen = [
        None if x is None else x.bool().expand(shape).contiguous()
        for x, shape in ((shown, (batch, stored)), (scored, (batch, stored)), (counted, of_rows))
    ]
    call(
        "attend_with_columns",
        *(part for x in rows for part in (x.data_ptr(), int64_of(x.stride()[:3]))),
        *(0 if x is None else x.data_ptr() for x in (*chosen, *weights)),
        *(out, first, 0 if second is None else second.data_ptr(), kind),
        *(batch, heads, groups, queries, stored, size, value_size),
        *(float(scale), torch.get_num_threads()),
    )
    # As fused attention is counted, so that a reading counts the same whatever it observes.
    note_operations(batch * query_heads * (size + value_size) * queries * stored)
    return out.transpose(1, 2), first, second
