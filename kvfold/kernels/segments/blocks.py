# SPDX-License-Identifier: Apache-2.0
"""Attention segment by segment in blocks of queries, which takes every case."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.segments.parts import softmax
from kvfold.kernels.views import RaggedView

QUERIES = 128  # of one block


def attend(query: Tensor, stored: RaggedView, mask: Tensor | None, options: LogitOptions) -> Tensor:
    """Output `[B, Hq, S, Dv]` of queries that see what `mask` shows; None: causal."""
    batch, query_heads, queries, size = query.shape
    segments = len(stored.keys.gaps)
    groups = query_heads * batch // segments
    softcap, sink_logits = options.get("softcap"), options.get("sink_logits")
    grouped = (query * options["scale"]).reshape(segments, groups, queries, size)
    out = query.new_empty(segments, groups, queries, stored.values.tail.shape[-1])
    pieces = zip(stored.keys.all_pieces(), stored.values.all_pieces(), strict=True)
    biases = None if stored.bias is None else stored.bias.all_pieces()
    for i, (keys, values) in enumerate(pieces):
        row, head = divmod(i, segments // batch)
        share = slice(head * groups, (head + 1) * groups)
        for start in range(0, queries, QUERIES):
            block = grouped[i, :, start : start + QUERIES].reshape(-1, size)
            logits = torch.cat([block @ piece.T for piece in keys], -1).unflatten(0, (groups, -1))
            if softcap is not None:
                logits = torch.tanh(logits / softcap) * softcap
            if biases is not None:
                logits = logits + torch.cat(biases[i])[:, 0]
            if mask is not None:
                of_row = mask[row, share if mask.shape[1] > 1 else slice(0, 1)]
                _hide(logits, of_row[:, start : start + QUERIES])
            elif queries > 1:
                _hide_later(logits, queries, start)
            weights = softmax(logits, None if sink_logits is None else sink_logits[share])
            out[i, :, start : start + QUERIES] = _mix(weights.to(query.dtype), values)
    return out.view(batch, query_heads, queries, -1)


def _hide(logits: Tensor, mask: Tensor) -> None:
    """Applies a mask `[1 or G, S, n]` to the last n slots of `logits [G, S, T]`, in place."""
    width = mask.shape[-1]
    if width == 0:
        return
    part = logits[..., logits.shape[-1] - width :]
    if mask.dtype == torch.bool:
        part.masked_fill_(~mask, -torch.inf)
    else:
        part.add_(mask)


def _hide_later(logits: Tensor, queries: int, start: int) -> None:
    """Causal mask in place for a block of queries from `start` on; the last `queries` slots."""
    slot = torch.arange(queries, device=logits.device)
    later = slot > slot[start : start + logits.shape[1], None]
    logits[..., logits.shape[-1] - queries :].masked_fill_(later, -torch.inf)


def _mix(weights: Tensor, values: list[Tensor]) -> Tensor:
    """Sum `[G, S, Dv]` over all pieces of `values [n, Dv]`, weighted `[G, S, T]`."""
    parts = weights.flatten(0, 1).split([len(piece) for piece in values], -1)
    mixed = parts[0] @ values[0]
    for part, piece in zip(parts[1:], values[1:], strict=True):
        mixed = torch.addmm(mixed, part, piece)
    return mixed.view(*weights.shape[:2], -1)
