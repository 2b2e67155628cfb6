# SPDX-License-Identifier: Apache-2.0
"""Attention inside chunks of a text, without a causal mask: sums over queries (Compactor)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.gather import take

TILE = 2**24  # most numbers of an intermediate result


def chunk_sums(queries: Tensor, keys: Tensor, columns: Tensor, size: int) -> Tensor:
    """Attention `[B, H, P]`, float32, that each key receives in its chunk, mean over the group.

    queries `[B, Hq, n, D]`, keys `[B, H, n, D]`. Each `size` of `columns [B, P]`, −1 for none, are
    a chunk: its queries attend to its keys, unmasked, by logits q·k that are not scaled.
    """
    batch, query_heads = queries.shape[:2]
    chunks = max(1, TILE // (batch * query_heads * size * size))
    tiles = columns.split(chunks * size, 1)
    return torch.cat([_of_tile(queries, keys, tile, size) for tile in tiles], -1)


def _of_tile(queries: Tensor, keys: Tensor, columns: Tensor, size: int) -> Tensor:
    heads = keys.shape[1]
    by_chunk = (columns.shape[1] // size, size)
    query, key = (
        take(x, columns[:, None].expand(-1, x.shape[1], -1)).unflatten(2, by_chunk)
        for x in (queries, keys)
    )  # [B, Hq, M, C, D], [B, H, M, C, D]
    query = query.unflatten(1, (heads, -1)).transpose(2, 3)  # [B, H, M, G, C, D]
    logits = (query.flatten(3, 4) @ key.transpose(-1, -2)).float()
    empty = (columns < 0).unflatten(1, by_chunk)[:, None]  # [B, 1, M, C]
    weights = logits.masked_fill(empty[..., None, :], -torch.inf).softmax(-1)
    by_query = weights.unflatten(3, query.shape[3:5])  # [B, H, M, G, C, C]
    received = by_query.masked_fill(empty[:, :, :, None, :, None], 0).sum(4)
    return received.mean(3).flatten(2)
