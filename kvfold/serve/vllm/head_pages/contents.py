# SPDX-License-Identifier: Apache-2.0
"""Entries read back from blocks of vLLM's caches `[blocks, H, block, 2·D]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import KvfoldError


def with_keys_transposed(kv_cache: Tensor, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys and values `[H, n·block, D]` in n `blocks` of the CPU's cache.

    Its kernels keep the keys of a page transposed, `[D, block]`, and then its values as they are.
    """
    _, heads, block, both = kv_cache.shape
    size = both // 2
    found = _taken(kv_cache, blocks).view(-1, heads, 2, block * size)
    keys = found[:, :, 0].view(-1, heads, size, block).permute(1, 0, 3, 2)
    values = found[:, :, 1].view(-1, heads, block, size).transpose(0, 1)
    return keys.reshape(heads, -1, size), values.reshape(heads, -1, size)


def plain(kv_cache: Tensor, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys and values `[H, n·block, D]` in n `blocks` of a cache with both of a token side by side.

    So FlashAttention reads it.
    """
    found = _taken(kv_cache, blocks).transpose(0, 1).flatten(1, 2)
    keys, values = found.chunk(2, dim=-1)
    return keys.contiguous(), values.contiguous()


def check_contents(layer: Any, block: int) -> None:
    """Raises KvfoldError if a layer's kernels lay entries out otherwise than they are read here.

    Known entries are written into a copy of a block.
    """
    heads, size = layer.impl.num_kv_heads, layer.impl.head_size
    cache = layer.kv_cache[:1].clone()
    rows = torch.arange(2 * block * heads * size, device=cache.device).view(2, block, heads, size)
    keys, values = (rows % 251).to(cache.dtype)
    slots = torch.arange(block, device=cache.device)
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)
    read = layer.impl.read_blocks(cache, [0])
    if not all(
        torch.equal(found, wrote.transpose(0, 1))
        for found, wrote in zip(read, (keys, values), strict=True)
    ):
        kernels = getattr(layer, "isa", type(layer.impl).__name__)
        raise KvfoldError(
            f"vLLM's kernels ({kernels}) lay entries out in a way that kvfold does not know"
        )


def _taken(kv_cache: Tensor, blocks: Sequence[int]) -> Tensor:
    return kv_cache[torch.tensor(blocks, dtype=torch.int64, device=kv_cache.device)]
