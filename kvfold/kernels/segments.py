# SPDX-License-Identifier: Apache-2.0
"""Attention to segments of different lengths, one after the other: nothing is padded."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.store.segments import Segments

BLOCK = 128


def attend_to_segments(
    query: Tensor,
    stored: Segments,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention output `[B, Hq, S, Dv]` of `query [B, Hq, S, D]`.

    `mask`, bool or additive `[B, 1 or Hq, S, n]`, is for the segments' last n entries; None: the
    query is the segments' last S entries, and causality is all. Rows that see nothing are 0.
    """
    batch, query_heads, queries, size = query.shape
    segments = len(stored.keys.alive)
    groups = query_heads * batch // segments
    grouped = (query * scale).reshape(segments, groups, queries, size)
    out = query.new_empty(segments, groups, queries, stored.values.tail.shape[-1])
    for i in range(segments):
        keys, values = stored.keys.pieces(i), stored.values.pieces(i)
        row, head = divmod(i, segments // batch)
        share = slice(head * groups, (head + 1) * groups)
        for start in range(0, queries, BLOCK):
            block = grouped[i, :, start : start + BLOCK]
            logits = torch.cat([block @ piece.T for piece in keys], -1)
            if softcap is not None:
                logits = torch.tanh(logits / softcap) * softcap
            if mask is not None:
                of_row = mask[row, share if mask.shape[1] > 1 else slice(0, 1)]
                _hide(logits, of_row[:, start : start + BLOCK])
            elif queries > 1:
                _hide_later(logits, queries, start)
            weights = _softmax(logits, None if sinks is None else sinks[share])
            out[i, :, start : start + BLOCK] = _mix(weights.to(query.dtype), values)
    return out.view(batch, query_heads, queries, -1)


def _hide(logits: Tensor, mask: Tensor) -> None:
    """Applies a mask `[1 or G, S, n]` to the last n of `logits [G, S, T]`, in place."""
    width = mask.shape[-1]
    if width == 0:
        return
    part = logits[..., logits.shape[-1] - width :]
    if mask.dtype == torch.bool:
        part.masked_fill_(~mask, -torch.inf)
    else:
        part.add_(mask)


def _hide_later(logits: Tensor, queries: int, start: int) -> None:
    """Causality for queries `start`… of a segment's last `queries` entries, in place."""
    column = torch.arange(queries, device=logits.device)
    later = column > column[start : start + logits.shape[1], None]
    logits[..., logits.shape[-1] - queries :].masked_fill_(later, -torch.inf)


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of `logits [G, S, T]`; attention sinks `[G]` take their share and leave no column."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sinks is None:
        return logits.softmax(-1).nan_to_num_(0.0)
    extra = sinks.to(logits.dtype).view(-1, 1, 1).expand(-1, logits.shape[1], 1)
    return torch.cat([logits, extra], -1).softmax(-1)[..., :-1]


def _mix(weights: Tensor, values: list[Tensor]) -> Tensor:
    """Sum over the pieces of `values [n, Dv]`, weighted `[G, S, T]`."""
    parts = weights.split([len(piece) for piece in values], -1)
    mixed = parts[0] @ values[0]
    for part, piece in zip(parts[1:], values[1:], strict=True):
        mixed = mixed + part @ piece
    return mixed
