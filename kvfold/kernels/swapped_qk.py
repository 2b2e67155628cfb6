# SPDX-License-Identifier: Apache-2.0
"""Column sums from a kernel that only returns rows': keys ask, and queries answer."""

from __future__ import annotations

import torch
from torch import Tensor

# Output and log-sum-exp, and more, of (query, key, value, dropout, is_causal, scale=…).
flash = torch.ops.aten._scaled_dot_product_flash_attention
# Kernels want head sizes that are multiples of 8; three columns hold a log-sum-exp.
COLUMNS = 8


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention output `[B, Hq, S, D]` and log-sum-exp `[B, Hq, S]`, aligned to the last key."""
    # Where causality is not a square, kernels differ in what they align it to.
    old = key.shape[2] - query.shape[2]
    out, lse = flash(query, key[:, :, old:], value[:, :, old:], 0.0, True, scale=scale)[:2]
    if old == 0:
        return out, lse
    before = flash(query, key[:, :, :old], value[:, :, :old], 0.0, False, scale=scale)[:2]
    both = torch.stack([before[1], lse])
    outs = torch.stack([before[0], out]) * both.softmax(0)[..., None]
    return outs.sum(0).to(out.dtype), both.logsumexp(0)


def column_sums_from_two_flash_passes(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, counted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention output `[B, Hq, S, D]` and the attention each entry received `[B, H, T]`, float32.

    query `[B, Hq, S, D]`, key and value `[B, H, T, D]` in half precision; causal, aligned to the
    last key. Sums run over the queries where `counted [B, S]` is true, mean over the query heads of
    a group.
    """
    heads, stored = key.shape[1:3]
    groups, queries = query.shape[1] // heads, query.shape[2]
    out, lse = causal_attention(query, key, value, scale)
    # exp(q·k·scale − lse) summed over queries is the exp of a log-sum-exp, with −lse/scale as
    # more columns of the queries, and ones as those of the keys.
    answers = _with_columns(query, _in_three(-lse / scale, query.dtype, counted))
    ones = torch.ones(3, dtype=key.dtype, device=key.device).expand(*key.shape[:3], 3)
    asking = _with_columns(key, ones).repeat_interleave(groups, 1)
    newest = asking[:, :, stored - queries :]
    # In reverse order a key comes after the queries that see it: causal again.
    received = _row_sums(newest.flip(2), answers.flip(2), True, scale).flip(2)
    if stored > queries:
        older = _row_sums(asking[:, :, : stored - queries], answers, False, scale)
        received = torch.cat([older, received], 2)
    return out, received.unflatten(1, (heads, groups)).mean(2)


def _in_three(numbers: Tensor, dtype: torch.dtype, counted: Tensor | None) -> Tensor:
    """Float32 `[B, Hq, S]` as `[B, Hq, S, 3]`, whose sum in `dtype` is as exact as float32.

    Of queries that do not count it is so low that nothing is added.
    """
    high = numbers.to(dtype)
    middle = (numbers - high).to(dtype)
    low = (numbers - high.float() - middle).to(dtype)
    three = torch.stack([high, middle, low], -1)
    if counted is None:
        return three
    nothing = torch.tensor([torch.finfo(dtype).min / 2, 0, 0], dtype=dtype, device=three.device)
    return torch.where(counted[:, None, :, None], three, nothing)


def _with_columns(rows: Tensor, columns: Tensor) -> Tensor:
    """`[B, H, T, D + 8]`: rows, columns, and zeros."""
    zeros = rows.new_zeros(COLUMNS - columns.shape[-1]).expand(*rows.shape[:3], -1)
    return torch.cat([rows, columns, zeros], -1)


def _row_sums(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Tensor:
    """Sums `[B, H, S]` of exp(query · key · scale) over the keys."""
    return flash(query, key, key, 0.0, is_causal, scale=scale)[1].exp()
