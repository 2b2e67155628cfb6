# SPDX-License-Identifier: Apache-2.0
"""Attention of one query per row to buffers that are longer than what is in them: for graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.kernels.segments import attend_to_segments
from kvfold.store.encoded import Flat
from kvfold.store.part import PartView
from kvfold.store.segments import Segments

# What reads numbers at every step cannot be replayed; older versions of torch have no such tag.
UNSAFE: dict[str, Any] = (
    {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
)


def attend_to_buffers(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention output `[B, Hq, 1, Dv]` of `query [B, Hq, 1, D]`.

    keys `[B, H, T, D]` and values `[B, H, T, Dv]` count where `visible [B, H, T]`; elsewhere they
    must be finite.
    """
    batch, query_heads, _, size = query.shape
    # The query heads of a group become rows of one head: no key is read twice.
    grouped = query.reshape(batch, keys.shape[1], -1, size)
    mask = visible[:, :, None]
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        return out.reshape(batch, query_heads, 1, -1)
    logits = (grouped @ keys.transpose(-1, -2)).float() * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        extra = sinks.view(1, *logits.shape[1:3], 1).expand(batch, -1, -1, -1)
        logits = torch.cat([logits, extra.to(logits.dtype)], -1)
    weights = logits.softmax(-1)[..., : keys.shape[2]]
    return (weights.to(values.dtype) @ values).reshape(batch, query_heads, 1, -1)


@torch.library.custom_op(
    "kvfold::attend_to_fixed_segments",
    mutates_args=(),
    schema="(Tensor query, Tensor old_keys, Tensor old_values, Tensor lengths, Tensor keys, "
    "Tensor values, Tensor alive, Tensor shown, Tensor first, Tensor used, float scale, "
    "float? softcap, Tensor? sinks) -> Tensor",
    **UNSAFE,
)
def attend_to_fixed_segments(
    query: Tensor,
    old_keys: Tensor,
    old_values: Tensor,
    lengths: Tensor,
    keys: Tensor,
    values: Tensor,
    alive: Tensor,
    shown: Tensor,
    first: Tensor,
    used: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention output `[B, Hq, 1, Dv]` of `query [B, Hq, 1, D]` to segments and their tails.

    One step of a graph, whatever the segments' lengths: all numbers are in tensors, of the CPU.
    Segments begin with `old_keys [sum of lengths, D]`, `lengths [B·H]`, and go on in the buffers
    `keys [B, H, T, D]`: there, `alive [B·H]` are the newest of the `first` entries, the next
    belong to all, and `used` is where they end. `shown [B, n]` are the newest n of the `first`
    that may be padding, False where they are.
    """
    end, new = int(used), int(used) - int(first)
    now = [count + new for count in alive.tolist()]
    sizes = lengths.tolist()
    stored = Segments(
        PartView(Flat(old_keys, sizes), keys[:, :, :end], now),
        PartView(Flat(old_values, sizes), values[:, :, :end], now),
        shown.shape[1] + new,
    )
    mask = None
    if not bool(shown.all()):
        mask = F.pad(shown, (0, new), value=True)[:, None, None].to(query.device)
    return attend_to_segments(query, stored, mask, scale=scale, softcap=softcap, sinks=sinks)


@attend_to_fixed_segments.register_fake
def _shape(query: Tensor, *args: Tensor | float | None) -> Tensor:
    values = args[4]
    assert isinstance(values, Tensor)
    return query.new_empty(*query.shape[:3], values.shape[-1])
