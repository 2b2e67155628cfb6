# SPDX-License-Identifier: Apache-2.0
"""Naive attention with column statistics, the truth of every kernel.

Plain torch over the whole weight matrix `[B, Hq, S, T]`: small inputs only.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from kvfold.kernels.logits import LogitOptions


def attend_with_column_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    counted: Tensor | None = None,
    **options: Unpack[LogitOptions],
) -> tuple[Tensor, Tensor]:
    """Attention output `[B, Hq, S, Dv]` and column sums `[B, H, T]` of the weights.

    query `[B, Hq, S, D]`, key `[B, H, T, D]`, value `[B, H, T, Dv]`; mask bool or additive
    `[B or 1, Hq or 1, S, T]`, or None for a causal one aligned to the last key. Column sums run
    over the queries where `counted [B, S]` is true (None: all), as means over the query heads of a
    group. Rows that see nothing are 0.
    """
    out, sums, _ = attend_with_moments(query, key, value, mask, counted=counted, **options)
    return out, sums


def attend_with_moments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    counted: Tensor | None = None,
    **options: Unpack[LogitOptions],
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attend_with_column_sums`, and the column sums `[B, H, T]` of the squared group means."""
    logits = _logits(query, key, options)
    attention = _softmax(_masked(logits, mask), options.get("sink_logits"))
    out = attention.to(value.dtype) @ value.repeat_interleave(_groups(query, key), 1)
    if counted is not None:
        attention = attention * counted[:, None, :, None]
    of_group = attention.unflatten(1, (key.shape[1], -1)).mean(2)
    return out, of_group.sum(-2), of_group.square().sum(-2)


def attend_with_column_maxima(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scored: Tensor,
    counted: Tensor | None = None,
    row_weights: Tensor | None = None,
    column_weights: Tensor | None = None,
    rms: bool = False,
    **options: Unpack[LogitOptions],
) -> tuple[Tensor, Tensor]:
    """Attention output `[B, Hq, S, Dv]` and column maxima `[B, H, T]` of scored entries (KVzip).

    Arguments as for `attend_with_column_sums`. The output is over all entries that the mask
    allows. The maxima are of a second softmax, over the allowed entries in `scored [B, T]` alone
    and without sink logits, taken over the queries where `counted [B, S]` is true and the query
    heads of a group. They are 0 for entries that are not scored; a query that may attend to no
    scored entry adds nothing. An additive mask hides an entry with less than half of its dtype's
    minimum. `row_weights [B, S]` of queries and `column_weights [B, Hq, T]` of entries, none below
    0, multiply the second softmax of each query head before any maximum is taken. With `rms` the
    root of the mean square over these queries and query heads takes the maximum's place.
    """
    logits = _logits(query, key, options)
    attention = _softmax(_masked(logits, mask), options.get("sink_logits"))
    out = attention.to(value.dtype) @ value.repeat_interleave(_groups(query, key), 1)
    candidates = _allowed(logits, mask) & scored[:, None, None, :]
    rows = _softmax(_masked(logits, mask).masked_fill(~candidates, -torch.inf), None)
    if counted is not None:
        rows = rows * counted[:, None, :, None]
    if row_weights is not None:
        rows = rows * row_weights[:, None, :, None]
    if column_weights is not None:
        rows = rows * column_weights[:, :, None]
    grouped = rows.unflatten(1, (key.shape[1], -1))
    if rms:
        queries = query.shape[2] if counted is None else counted.sum(-1).view(-1, 1, 1)
        count = torch.as_tensor(queries * grouped.shape[2], device=query.device)
        return out, (grouped.square().sum((2, 3)) / count.clamp(min=1)).sqrt()
    return out, grouped.amax((2, 3))


def _groups(query: Tensor, key: Tensor) -> int:
    return query.shape[1] // key.shape[1]


def _logits(query: Tensor, key: Tensor, options: LogitOptions) -> Tensor:
    """Logits `[B, Hq, S, T]` before any mask."""
    keys, softcap = key.repeat_interleave(_groups(query, key), 1), options.get("softcap")
    logits = query @ keys.transpose(-1, -2) * options["scale"]
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _allowed(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Bool mask of the entries that queries may attend to; broadcasts to the logits' shape."""
    if mask is None:
        queries, stored = logits.shape[-2:]
        square = torch.ones(queries, stored, dtype=torch.bool, device=logits.device)
        return square.tril(stored - queries)
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None or mask.dtype == torch.bool:
        logits = logits.masked_fill(~_allowed(logits, mask), -torch.inf)
    else:
        logits = logits + mask
    return logits if logits.dtype == torch.float64 else logits.float()


def _softmax(logits: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Weights of logits `[B, Hq, S, T]`; rows of only −∞ become 0.

    Sink logits `[Hq]` join the denominator and are not returned.
    """
    if sink_logits is None:
        return logits.softmax(-1).nan_to_num(0.0)
    extra = sink_logits.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    return torch.cat([logits, extra], -1).softmax(-1)[..., :-1].nan_to_num(0.0)
