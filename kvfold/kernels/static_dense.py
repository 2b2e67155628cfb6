# SPDX-License-Identifier: Apache-2.0
"""Decode attention over buffers of a fixed size, partly filled, for compiled graphs."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.single_query import softmax_beside


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
