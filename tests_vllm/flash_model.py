# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's two calls as torch models, and vLLM's backend with them on a CPU.

The models hold callers to what the kernels read: types, shapes, strides and bounds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends import flash_attn
from vllm.v1.kv_cache_interface import KVCacheLayout

from kvfold.serve.vllm.head_pages.flash_attention import (
    FlashHeadPagesAttention,
    FlashHeadPagesBackend,
    FlashHeadPagesBuilder,
)


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Writes entries `[≥ n, H, D]` into slots `[n]`, int64, of caches `[pages, block, H, D]`."""
    assert kv_cache_dtype == "auto" and slot_mapping.dtype == torch.int64
    assert key.shape[1:] == key_cache.shape[2:] and key_cache.stride(-1) == 1
    block = key_cache.shape[1]
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block, slot % block] = key[row]
            value_cache[slot // block, slot % block] = value[row]


def flash_attn_varlen_func(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    block_table: Tensor,
    k_descale: Tensor,
    v_descale: Tensor,
    **others: Any,
) -> None:
    """Causal attention of R requests to pages `k`, `v [pages, block, H, D]`.

    Queries `q [T, Hq, D]`; those of request r end with the last of its `seqused_k[r]` entries.
    """
    usual = {"causal": True, "fa_version": 2, "softcap": 0, "window_size": [-1, -1]}
    given = {
        name: value for name, value in others.items() if value not in (None, 0, usual.get(name))
    }
    assert not given, given
    requests, block, group = len(seqused_k), k.shape[1], q.shape[1] // k.shape[2]
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and out.shape == q.shape
    assert k_descale.shape == v_descale.shape == (requests, k.shape[2])
    for numbers in (cu_seqlens_q, seqused_k, block_table):
        assert numbers.dtype == torch.int32 and numbers.stride(-1) == 1
    assert cu_seqlens_q.shape == (requests + 1,) and len(block_table) == requests
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    for row, length in enumerate(lengths):
        asked = slice(starts[row], starts[row + 1])
        count = asked.stop - asked.start
        assert count <= max_seqlen_q and count <= length <= max_seqlen_k
        pages = block_table[row, : -(-length // block)].long()
        assert len(pages) == -(-length // block) and int(pages.min()) >= 0
        keys, values = (
            part[pages].flatten(0, 1)[:length].repeat_interleave(group, 1).transpose(0, 1)
            for part in (k, v)
        )
        logits = q[asked].transpose(0, 1) @ keys.mT * softmax_scale
        later = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
        weights = logits.masked_fill(later, -torch.inf).softmax(-1)
        out[asked] = (weights @ values).transpose(0, 1)


class OnCpu(FlashHeadPagesAttention):
    """FlashAttention 2, which vLLM does not find on a CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vllm_flash_attn_version, self.supports_quant_query_input = 2, False


class OnCpuBackend(FlashHeadPagesBackend):
    """The backend, in the layout that the connector asks for on a GPU."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_builder_cls() -> type[FlashHeadPagesBuilder]:
        return FlashHeadPagesBuilder

    @staticmethod
    def get_impl_cls() -> type[OnCpu]:
        return OnCpu


def install(monkeypatch: Any) -> None:
    """Puts the models into vLLM's FlashAttention."""
    for model in (reshape_and_cache_flash, flash_attn_varlen_func):
        monkeypatch.setattr(flash_attn, model.__name__, model, raising=False)
