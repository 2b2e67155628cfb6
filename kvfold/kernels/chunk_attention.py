# SPDX-License-Identifier: Apache-2.0
"""Attention inside chunks of a text, without a causal mask: sums over queries (Compactor)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.gather import take

# Most numbers of an intermediate result: on a CPU it stays in the processor's cache.
TILE, CPU_TILE = 2**24, 2**19


def chunk_sums(queries: Tensor, keys: Tensor, columns: Tensor, size: int) -> Tensor:
    """Attention `[B, H, P]`, float32, that each key receives in its chunk, mean over the group.

    queries `[B, Hq, n, D]`, keys `[B, H, n, D]`. Each `size` of `columns [B, P]`, −1 for none, are
    a chunk: its queries attend to its keys, unmasked, by logits q·k that are not scaled.
    """
    batch, query_heads = queries.shape[:2]
    most = CPU_TILE if keys.device.type == "cpu" else TILE
    chunks = max(1, most // (batch * query_heads * size * size))
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
    # Products of queries and keys, which are not scaled, may exceed float16.
    logits = query.flatten(3, 4).float() @ key.transpose(-1, -2).float()
    empty = (columns < 0).unflatten(1, by_chunk)[:, None, :, None]  # [B, 1, M, 1, C]
    if not bool(empty.any()):
        return logits.softmax(-1).sum(3).flatten(2) / query.shape[3]
    weights = logits.masked_fill(empty, -torch.inf).softmax(-1)
    of_query = empty.expand(-1, -1, -1, query.shape[3], -1).flatten(3)[..., None]
    return weights.masked_fill(of_query, 0).sum(3).flatten(2) / query.shape[3]
