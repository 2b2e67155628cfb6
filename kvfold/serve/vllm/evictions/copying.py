# SPDX-License-Identifier: Apache-2.0
"""The worker's side of evictions: what stays of a request, copied into pages of single heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import BudgetError, KvfoldError
from kvfold.policies import Prefill, Rope
from kvfold.policies.row_policy import RowPolicy, StoredRow
from kvfold.serve.vllm.evictions.asked import AskedEviction
from kvfold.serve.vllm.evictions.rank_heads import RankHeads
from kvfold.serve.vllm.evictions.schedule import EvictionOrder
from kvfold.serve.vllm.head_pages.layout import HeadPages, Layout, Slabs, all_pages
from kvfold.serve.vllm.head_pages.queries import QueryTail


class EvictedRow:
    """A request of which entries were evicted: which tokens its own pages hold, and where.

    `layers` are vLLM's attention layers by index, pages hold `block` entries. Each of the `ranks`
    chooses for all heads, and copies its own.
    """

    def __init__(
        self,
        eviction: AskedEviction,
        layers: Mapping[int, Any],
        rope: Rope | None,
        block: int,
        ranks: RankHeads,
    ) -> None:
        self.layers, self.rope, self.block, self.ranks = layers, rope, block, ranks
        self._slabs = Slabs.of(layers)
        self.layout: Layout | None = None
        self.blocks = 0  # that hold the pages, of the largest rank
        self._policy = RowPolicy(eviction.policy, eviction.budget)
        self._tokens: list[list[Tensor]] = []  # of each layer and head, in its own pages
        self._read = False  # the prompt, and what stays of it was chosen

    def evict(self, order: EvictionOrder, queries: QueryTail | None) -> bool:
        """Copies what stays into the targets of `order`; False: everything stays where it is.

        Raises KvfoldError as the method does, and for more pages than the targets hold.
        """
        after = order.blocks[self._replaced - order.first :]
        stored = self._stored(after, order.tokens, queries)
        try:
            kept = self._policy.round(stored) if self._read else self._of_prompt(stored, order)
        except BudgetError:
            budget = self._policy.budget
            if budget is not None and budget.kind != "ratio":
                raise
            kept = None  # what is to be kept fills less than a page in some layer
        self._read = True
        if kept is None:
            return False
        rest = order.tokens % self.block
        own = [[head[: len(head) - rest] for head in layer] for layer in kept]
        pages = HeadPages.of([[len(head) for head in layer] for layer in own], self.block)
        size = self.ranks.size
        if pages is None or pages.blocks(size) > len(order.targets):
            raise KvfoldError("more is kept than the blocks that were asked for hold")
        held, self.blocks = pages.of_heads(self.ranks.own), pages.blocks(size)
        self.layout = Layout.of(held, order.targets, order.tokens // self.block, self._slabs)
        self._tokens = [
            [tokens[at] for tokens, at in zip(*of_layer, strict=True)]
            for of_layer in zip(stored.tokens, own, strict=True)
        ]
        for number, of_layer in enumerate(zip(stored.keys, stored.values, own, strict=True)):
            keys, values, at = (part[self.ranks.own] for part in of_layer)
            self._write(number, keys, values, at)
        return True

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.layers[0].kv_cache.device
        return device

    @property
    def _replaced(self) -> int:
        return 0 if self.layout is None else self.layout.replaced

    def _of_prompt(
        self, stored: StoredRow, order: EvictionOrder
    ) -> Sequence[Sequence[Tensor]] | None:
        """What stays of a prompt; None: everything."""
        kept = self._policy.prompt(
            Prefill(
                [torch.stack(list(keys)) for keys in stored.keys],
                [torch.stack(list(values)) for values in stored.values],
                stored.queries,
                self.rope,
                None if order.ids is None else torch.tensor(order.ids, device=self._device),
                scale=self.layers[0].impl.scale,
                softcap=self.layers[0].impl.logits_soft_cap or None,
            )
        )
        everything = all(len(head) == kept.tokens for layer in kept.indices for head in layer)
        return None if everything else kept.indices

    def _stored(self, after: list[int], seen: int, queries: QueryTail | None) -> StoredRow:
        """The request's entries: those in its own pages, then those in vLLM's blocks `after`."""
        first, heads = self._replaced * self.block, self.ranks
        new = torch.arange(first, seen, device=self._device)
        keys: list[list[Tensor]] = []
        values: list[list[Tensor]] = []
        tokens: list[list[Tensor]] = []
        for number in range(len(self.layers)):
            cache, read = self.layers[number].kv_cache, self.layers[number].impl.read_blocks
            parts = [list(rows[:, : len(new)]) for rows in read(cache, after)]
            before = self._tokens[number] if self._tokens else [new[:0]] * heads.count
            if self.layout is not None:
                counts = [len(of_head) for of_head in before[heads.own]]
                pages = self.layout.pages(number).tolist()
                own = [rows[0].split(counts) for rows in read(all_pages(cache), pages)]
                parts = [
                    [torch.cat(pair) for pair in zip(*each, strict=True)]
                    for each in zip(own, parts, strict=True)
                ]
            tokens.append([torch.cat([of_head, new]) for of_head in before])
            lengths = [len(of_head) for of_head in tokens[number]]
            for into, rows in zip((keys, values), parts, strict=True):
                into.append(heads.heads(rows, lengths))
        last = None
        if queries is not None:
            last = [heads.queries(of_layer) for of_layer in queries.stacked(seen)]
        return StoredRow(keys, values, tokens, seen, last)

    def _write(
        self, number: int, keys: Sequence[Tensor], values: Sequence[Tensor], at: Sequence[Tensor]
    ) -> None:
        """Writes the entries `at` of a layer's heads into its pages."""
        assert self.layout is not None
        layer, slots = self.layers[number], self.layout.slots(number, self.block)
        chosen = [
            torch.cat([rows[own] for rows, own in zip(heads, at, strict=True)])[:, None]
            for heads in (keys, values)
        ]
        slots, pages = slots.to(chosen[0].device), all_pages(layer.kv_cache)
        layer.impl.do_kv_cache_update(layer, *chosen, pages, slots)
