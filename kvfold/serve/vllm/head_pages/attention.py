# SPDX-License-Identifier: Apache-2.0
"""Attention over pages of single heads by vLLM's own code, in steps where a request has some.

Each KV head of each request becomes a request of its own, of a model that has one KV head. What a
backend of vLLM needs for that is in `cpu.py` and `flash_attention.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.models.utils import extract_layer_index

from kvfold.serve.vllm.head_pages.layout import RUNNING, Slabs, all_pages
from kvfold.serve.vllm.head_pages.queries import WATCHED, WatchedStep
from kvfold.serve.vllm.head_pages.tables import PageTables, by_head


class HeadStep:
    """What a step needs beside vLLM's metadata `common`, made in its forward.

    Layouts come after vLLM has made that.
    """

    def __init__(self, builder: Any, tables: PageTables, common: Any) -> None:
        rows = common.num_reqs
        lengths = common.seq_lens[:rows].cpu()
        blocks = common.block_table_tensor[:rows].cpu()
        starts = common.query_start_loc_cpu[: rows + 1]
        last = (lengths.long() - 1).clamp(min=0) // tables.block
        writing = blocks.gather(1, last[:, None])[:, 0].tolist()
        at = common.seq_lens.device
        self.watched = WatchedStep.of(writing, starts.tolist(), lengths.tolist(), at)
        if RUNNING:
            tables.update(blocks, lengths, [RUNNING.get(block) for block in writing])
            heads = tables.slabs.heads
            self._builder, self._common, self._tables = builder, common, tables
            self._starts, self._order = by_head(starts, heads)
            self._lengths = lengths.repeat_interleave(heads)
            self._made: dict[int, Any] = {}

    @cached_property
    def order(self) -> Tensor | None:
        """Where each query goes, as `by_head` says; None: they stay where they are."""
        return None if self._order is None else self._order.to(self._common.seq_lens.device)

    def metadata(self, layer: int) -> Any:
        """vLLM's metadata of a layer's heads, each a request of its own."""
        like = self._tables.alike[layer]
        if like not in self._made:
            self._made[like] = self._metadata(like)
        table = self._tables.of_layer(layer, self._common.seq_lens.device)
        return replace(self._made[like], block_table=table)

    def _metadata(self, layer: int) -> Any:
        common, device = self._common, self._common.seq_lens.device
        lengths = self._lengths + self._tables.added[layer]
        of_heads = replace(
            common,
            query_start_loc=self._starts.to(device),
            query_start_loc_cpu=self._starts,
            seq_lens=lengths.to(device),
            num_reqs=len(lengths),
            num_actual_tokens=common.num_actual_tokens * self._tables.slabs.heads,
            max_seq_len=int(lengths.max()),
            block_table_tensor=self._tables.of_layer(layer, device),
        )
        return self._builder.vllms.build(self._builder.of_one_head, 0, of_heads)


class HeadPagesBuilder:
    """Adds pages of single heads to a builder of vLLM's metadata, `vllms`, by inheritance.

    `numbers_of_heads` are the names of its numbers of query and KV heads.
    """

    vllms: ClassVar[Any]
    numbers_of_heads: ClassVar[tuple[str, str]]

    def __init__(self, kv_cache_spec: Any, layer_names: Sequence[str], *args: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, *args)  # type: ignore[call-arg]
        self.layers = 1 + max(extract_layer_index(name) for name in layer_names)
        self.page_size = kv_cache_spec.block_size
        self._tables: PageTables | None = None

    @cached_property
    def of_one_head(self) -> Any:
        """The builder of a model with one KV head."""
        return _of_one_head(self, *self.numbers_of_heads)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Metadata of a step; its `of_heads` makes a `HeadStep` of the step and a layer's cache."""
        made = self.vllms.build(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        made.of_heads = partial(self._step, common_attn_metadata)
        return made

    def _step(self, common: Any, kv_cache: Tensor) -> HeadStep:
        if self._tables is None:
            blocks, heads = kv_cache.shape[:2]
            self._tables = PageTables(Slabs(self.layers, blocks, heads), self.page_size)
        return HeadStep(self, self._tables, common)


class HeadPagesAttention:
    """Adds pages of single heads to an attention of vLLM's, `vllms`, by inheritance."""

    vllms: ClassVar[Any]

    @staticmethod
    def read_blocks(kv_cache: Tensor, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, n·block, D]` in n blocks of its cache."""
        raise NotImplementedError

    @cached_property
    def of_one_head(self) -> Any:
        """The attention of a model with one KV head."""
        return _of_one_head(self, "num_heads", "num_kv_heads")

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
        """Attention of a step: query `[T, Hq, D]`, output `[T, Hq·D]` or as query."""
        step = None if attn_metadata is None else _step_of(attn_metadata, kv_cache)
        number = extract_layer_index(layer.layer_name)
        if step is not None and step.watched is not None:
            step.watched.read(number, query)
        if step is None or not RUNNING:
            found: Tensor = self.vllms.forward(
                self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            return found
        made = step.metadata(number)
        heads, tokens = kv_cache.shape[1], attn_metadata.num_actual_tokens
        size = query.shape[-1]
        queries = query[:tokens].reshape(tokens * heads, -1, size)
        out = output[:tokens].view_as(queries)
        if step.order is not None:
            queries = torch.empty_like(queries).index_copy_(0, step.order, queries)
        found = out if step.order is None else torch.empty_like(queries)
        self.vllms.forward(
            self.of_one_head, layer, queries, None, None, all_pages(kv_cache), made, found
        )
        if step.order is not None:
            torch.index_select(found, 0, step.order, out=out)
        return output


def _of_one_head(of: Any, queries: str, heads: str) -> Any:
    """A copy of vLLM's builder or attention, of one KV head and the query heads that share it."""
    made = copy(of)
    setattr(made, queries, getattr(of, queries) // getattr(of, heads))
    setattr(made, heads, 1)
    return made


def _step_of(metadata: Any, kv_cache: Tensor) -> HeadStep | None:
    """The step of vLLM's metadata; None: no request has pages of its own, or is watched."""
    if not (RUNNING or WATCHED):
        return None
    if callable(metadata.of_heads):
        metadata.of_heads = metadata.of_heads(kv_cache)
    step: HeadStep = metadata.of_heads
    return step
