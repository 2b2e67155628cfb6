# SPDX-License-Identifier: Apache-2.0
"""Column sums from flash attention's log-sum-exp, in a second pass with Q and K swapped."""

from __future__ import annotations

import torch
from torch import Tensor

# (query, key, value, dropout, is_causal, scale=…) → output, log-sum-exp, …
flash = torch.ops.aten._scaled_dot_product_flash_attention
# Channels added to D: three hold a log-sum-exp; kernels need a head size that 8 divides.
COLUMNS = 8


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention output `[B, Hq, S, D]` and log-sum-exp `[B, Hq, S]`.

    query `[B, Hq, S, D]`, key and value `[B, H, T, D]`; the queries are the last S entries.
    """
    # Kernels align a causal mask that is not square differently, so the square is a call alone.
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
    """Attention output `[B, Hq, S, D]` and column sums `[B, H, T]` of its weights, float32.

    query `[B, Hq, S, D]`, key and value `[B, H, T, D]` in half precision; causal, aligned to the
    last key. Sums run over the queries where `counted [B, S]` is true, mean over the query heads of
    a group.
    """
    heads, stored = key.shape[1:3]
    groups, queries = query.shape[1] // heads, query.shape[2]
    out, lse = causal_attention(query, key, value, scale)
    # A column sum of exp(q·k·scale − lse) is the exp of a log-sum-exp over queries: −lse/scale
    # goes into more channels of the queries, ones into the same channels of the keys.
    as_keys = _with_channels(query, _in_three(-lse / scale, query.dtype, counted))
    ones = torch.ones(3, dtype=key.dtype, device=key.device).expand(*key.shape[:3], 3)
    as_queries = _with_channels(key, ones).repeat_interleave(groups, 1)
    newest = as_queries[:, :, stored - queries :]
    # In reverse order a key comes after the queries that see it, so the mask is causal again.
    received = _row_sums(newest.flip(2), as_keys.flip(2), True, scale).flip(2)
    if stored > queries:
        older = _row_sums(as_queries[:, :, : stored - queries], as_keys, False, scale)
        received = torch.cat([older, received], 2)
    return out, received.unflatten(1, (heads, groups)).mean(2)


def _in_three(numbers: Tensor, dtype: torch.dtype, counted: Tensor | None) -> Tensor:
    """Float32 numbers `[B, Hq, S]` as three of `dtype` each, `[B, Hq, S, 3]`, exact in their sum.

    Queries that do not count get half of the dtype's minimum: their weights underflow to 0.
    """
    high = numbers.to(dtype)
    middle = (numbers - high).to(dtype)
    low = (numbers - high.float() - middle).to(dtype)
    three = torch.stack([high, middle, low], -1)
    if counted is None:
        return three
    nothing = torch.tensor([torch.finfo(dtype).min / 2, 0, 0], dtype=dtype, device=three.device)
    return torch.where(counted[:, None, :, None], three, nothing)


def _with_channels(rows: Tensor, channels: Tensor) -> Tensor:
    """Rows `[B, H, T, D]`, then `channels [B, H, T, 3]` and zeros: `[B, H, T, D + 8]`."""
    zeros = rows.new_zeros(COLUMNS - channels.shape[-1]).expand(*rows.shape[:3], -1)
    return torch.cat([rows, channels, zeros], -1)


def _row_sums(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Tensor:
    """Sums `[B, H, S]` of exp(query · key · scale) over the keys."""
    return flash(query, key, key, 0.0, is_causal, scale=scale)[1].exp()
