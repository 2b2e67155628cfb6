# SPDX-License-Identifier: Apache-2.0
"""Decode attention over dense entries, and over buffers of a fixed size for compiled graphs.

One query per row, with or without its row of weights. Reference:
`reference.attend_with_column_sums`, whose column sums of one query are its weights.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.kernels.dispatch import row_path, step_path
from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.native import single_query as native


def attend_single(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention output `[B, 1, Hq, Dv]` of `query [B, Hq, 1, D]` over all entries, no mask.

    key `[B, H, T, D]`, value `[B, H, T, Dv]`. The query heads of a group become rows of one head,
    so that keys are read once.
    """
    batch, heads, _, size = key.shape
    grouped = query.view(batch, heads, -1, size)
    # Fused kernels return other memory layouts than their inputs have.
    out = F.scaled_dot_product_attention(grouped, key, value, scale=scale)
    return out.reshape(batch, 1, -1, value.shape[-1])


def attend_with_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    **options: Unpack[LogitOptions],
) -> tuple[Tensor, Tensor]:
    """Attention output `[B, 1, Hq, Dv]` and its row of weights `[B, Hq, 1, T]`.

    query `[B, Hq, 1, D]`, key `[B, H, T, D]`, value `[B, H, T, Dv]`. `hidden [B·H, G or 1, T]` is
    added to the logits, in float32 if it is; at least one entry must stay visible. Weights are
    float32, or float64 for a float64 query.
    """
    if row_path(query, key, value, options) == "native":
        return native.attend_with_row(query, key, value, hidden, options["scale"])[:2]
    softcap, keys = options.get("softcap"), key.flatten(0, 1)
    grouped = query.reshape(len(keys), -1, query.shape[3])
    at_once = hidden is not None and softcap is None and hidden.dtype == key.dtype
    logits = products(grouped, keys, hidden if at_once else None, options["scale"])
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if hidden is not None and not at_once:
        logits = logits + hidden
    return _weighted(logits, value, options.get("sink_logits"))


def attend_beside(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    slot: int,
    **options: Unpack[LogitOptions],
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attend_with_row`, and products `[B, H, T]` of the keys with that at `slot` (D2O).

    One matmul reads the keys once for both: no softcap is applied, and `hidden [B·H, 1, T]` is
    added to the products too.
    """
    if row_path(query, key, value, options) == "native":
        out, row, along = native.attend_with_row(query, key, value, hidden, options["scale"], slot)
        assert along is not None
        return out, row, along
    keys = key.flatten(0, 1)
    grouped = query.reshape(len(keys), -1, query.shape[3]) * options["scale"]
    few = torch.cat([grouped, keys[:, slot : slot + 1]], 1)
    logits, beside = products(few, keys, hidden, 1.0).split([grouped.shape[1], 1], 1)
    out, row = _weighted(logits, value, options.get("sink_logits"))
    return out, row, beside.view(key.shape[:3])


def _weighted(logits: Tensor, value: Tensor, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output `[B, 1, Hq, Dv]` and weights `[B, Hq, 1, T]` of logits `[B·H, G, T]`."""
    batch, _, stored, size = value.shape
    weights = logits.softmax(-1) if sink_logits is None else softmax_beside(logits, sink_logits)
    out = torch.bmm(weights.to(value.dtype), value.flatten(0, 1))
    return out.view(batch, 1, -1, size), weights.reshape(batch, -1, 1, stored)


def softmax_beside(logits: Tensor, sink_logits: Tensor) -> Tensor:
    """Weights of logits `[B·H, G, T]`; sink logits `[Hq]` join the denominator only."""
    extra = sink_logits.to(logits.dtype).view(-1, logits.shape[1], 1)
    extra = extra.repeat(len(logits) // len(extra), 1, 1)
    return torch.cat([logits, extra], -1).softmax(-1)[..., :-1]


def products(few: Tensor, keys: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    """Products `[R, G, T]` of `few [R, G, D]` and `keys [R, T, D]`, times `scale`.

    `hidden [R, G or 1, T]`, −∞ or 0, is added to them.
    """
    # Keys come first: on a CPU this product is faster than its transpose.
    columns = few.transpose(1, 2)
    if hidden is None:
        return torch.bmm(keys, columns * scale).transpose(1, 2)
    return torch.baddbmm(hidden.transpose(1, 2), keys, columns, alpha=scale).transpose(1, 2)


def mean_of_heads(row: Tensor, groups: int) -> Tensor:
    """Means `[B, groups, T]` of a row of weights `[B, Hq, 1, T]` over equal groups of heads.

    Always a copy, as callers accumulate in place. A product with 1/G: a reduction takes twice as
    long in a decode step.
    """
    batch, heads, _, stored = row.shape
    each = heads // groups
    if torch.compiler.is_compiling():
        return row.view(batch, groups, each, stored).mean(2)
    weights = _mean_weights(batch * groups, each, row.dtype, row.device)
    return torch.bmm(weights, row.reshape(-1, each, stored)).view(batch, groups, stored)


@lru_cache(maxsize=32)
def _mean_weights(groups: int, each: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((groups, 1, each), 1 / each, dtype=dtype, device=device)


def attend_to_buffers(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    bias: Tensor | None = None,
    **options: Unpack[LogitOptions],
) -> Tensor:
    """Attention output `[B, Hq, 1, Dv]` of `query [B, Hq, 1, D]`.

    keys `[B, H, T, D]`, values `[B, H, T, Dv]`; slots where `visible [B, H, T]` is false are
    masked, and must hold finite numbers. `bias [B, H, T]` is added to the logits.
    """
    if step_path(query, values.shape[-1]) == "triton":
        from kvfold.kernels.planned import attend_to_visible

        return attend_to_visible(query, keys, values, visible, bias, **options)
    scale, softcap = options["scale"], options.get("softcap")
    sink_logits = options.get("sink_logits")
    batch, query_heads, _, size = query.shape
    # The query heads of a group become rows of one head, so that keys are read once.
    grouped = query.reshape(batch, keys.shape[1], -1, size)
    mask = visible[:, :, None]
    if softcap is None and sink_logits is None and bias is None:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        return out.reshape(batch, query_heads, 1, -1)
    logits = (grouped * scale @ keys.transpose(-1, -2)).float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if bias is not None:
        logits = logits + bias[:, :, None]
    logits = logits.masked_fill(~mask, -torch.inf)
    if sink_logits is None:
        weights = logits.softmax(-1)
    else:
        weights = softmax_beside(logits.flatten(0, 1), sink_logits).unflatten(0, keys.shape[:2])
    return (weights.to(values.dtype) @ values).reshape(batch, query_heads, 1, -1)
