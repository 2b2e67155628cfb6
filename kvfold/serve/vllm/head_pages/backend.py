# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention over pages of single heads, in steps where a request has some."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from kvfold.serve.vllm.head_pages.layout import RUNNING, of_heads
from kvfold.serve.vllm.head_pages.queries import WATCHED, watched_rows
from kvfold.serve.vllm.head_pages.tables import PageTables, by_head


class HeadStep:
    """What a step needs beside vLLM's metadata, made in its forward: layouts come after that."""

    def __init__(self, builder: HeadPagesBuilder, common: Any) -> None:
        self.builder, self.tables = builder, builder.tables
        rows = common.num_reqs
        lengths, blocks = common.seq_lens[:rows], common.block_table_tensor[:rows]
        last = blocks.gather(1, (lengths.long()[:, None] - 1) // builder.block_size)[:, 0].tolist()
        starts = common.query_start_loc[: rows + 1]
        self.watched = watched_rows(last, starts.tolist()) if WATCHED else []
        if RUNNING:
            self.tables.update(blocks, lengths, [RUNNING.get(block) for block in last])
            self.starts, self.order = by_head(starts, builder.num_kv_heads)
            self._lengths = lengths.repeat_interleave(builder.num_kv_heads)
            self._plans: dict[int, tuple[Tensor, Tensor]] = {}

    def plan(self, layer: int) -> tuple[Tensor, Tensor]:
        """Numbers of entries `[R·H]` that each head reads, and the kernel's own schedule."""
        like = self.tables.alike[layer]
        if like not in self._plans:
            lengths = self._lengths + self.tables.added[layer]
            self._plans[like] = lengths, self._schedule(lengths)
        return self._plans[like]

    def _schedule(self, lengths: Tensor) -> Tensor:
        builder = self.builder
        schedule: Tensor = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=builder.num_heads // builder.num_kv_heads,
            num_kv_heads=1,
            head_dim=builder.head_dim,
            seq_lens=lengths,
            dtype=builder.dtype,
            query_start_loc=self.starts,
            causal=True,
            sliding_window_size=-1,
            isa=builder.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=builder.kv_cache_dtype,
        )
        return schedule


class HeadPagesBuilder(CPUAttentionMetadataBuilder):
    """vLLM's metadata of a step, with what the tables of single heads are made of."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], *args: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, *args)
        layers = 1 + max(extract_layer_index(name) for name in layer_names)
        self.tables = PageTables(layers, self.num_kv_heads, self.block_size)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any) -> Any:
        """Metadata of a step."""
        made = super().build(common_prefix_len, common_attn_metadata, *args)
        made.of_heads = lambda: HeadStep(self, common_attn_metadata)
        return made


class HeadPagesImpl(CPUAttentionBackendImpl):
    """vLLM's attention; in a step with layouts, each head of a request as a request of its own."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a step: query `[T, Hq, D]`, output `[T, Hq·D]`."""
        index = extract_layer_index(layer.layer_name)
        step = None if attn_metadata is None else _step_of(attn_metadata)
        for reader, read in () if step is None else step.watched:
            reader.read(index, query[read])
        if step is None or not RUNNING:
            result: Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            return result
        tokens = attn_metadata.num_actual_tokens
        lengths, schedule = step.plan(index)
        group = self.num_queries_per_kv
        queries = query[:tokens].reshape(-1, group, self.head_size)
        out = output[:tokens].view(-1, group, self.head_size)
        if step.order is not None:
            queries = torch.empty_like(queries).index_copy_(0, step.order, queries)
        found = out if step.order is None else torch.empty_like(queries)
        keys, values = _keys_and_values(kv_cache)
        ops.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=keys,
            value_cache=values,
            output=found,
            query_start_loc=step.starts,
            seq_lens=lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=step.tables.table[index],
            softcap=self.logits_soft_cap,
            scheduler_metadata=schedule,
            s_aux=None,
            dynamic_causal=None,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        if step.order is not None:
            torch.index_select(found, 0, step.order, out=out)
        return output


def _step_of(metadata: Any) -> HeadStep | None:
    """The step of vLLM's metadata; None: no request has pages of its own, or is watched."""
    if not (RUNNING or WATCHED):
        return None
    if callable(metadata.of_heads):
        metadata.of_heads = metadata.of_heads()
    step: HeadStep = metadata.of_heads
    return step


def _keys_and_values(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[blocks·H, 1, block, D]` of pages of single heads."""
    pages = of_heads(kv_cache)
    keys, values = pages.view(len(pages), 1, 2 * pages.shape[2], -1).chunk(2, dim=2)
    return keys, values


class HeadPagesBackend(CPUAttentionBackend):
    """vLLM's CPU backend with pages of single heads."""

    @staticmethod
    def get_builder_cls() -> type[HeadPagesBuilder]:
        """The class that builds each step's metadata."""
        return HeadPagesBuilder

    @staticmethod
    def get_impl_cls() -> type[HeadPagesImpl]:
        """The class that attends."""
        return HeadPagesImpl
