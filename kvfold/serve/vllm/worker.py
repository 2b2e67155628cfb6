# SPDX-License-Identifier: Apache-2.0
"""Worker side of the connector: writes the rank's KV heads of a context into its pages."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvfold.contexts.files.format import opened, told_as_damage
from kvfold.errors import ContextFileError, KvfoldError
from kvfold.serve.vllm.evictions.copying import EvictedRow
from kvfold.serve.vllm.evictions.rank_heads import RankHeads
from kvfold.serve.vllm.evictions.schedule import EvictionDone
from kvfold.serve.vllm.export import LayerPages, pages
from kvfold.serve.vllm.head_pages.layout import RUNNING, Layout, Slabs, all_pages
from kvfold.serve.vllm.head_pages.queries import WATCHED, QueryRing, QueryTail
from kvfold.serve.vllm.meta_model import MetaModel
from kvfold.serve.vllm.placeholders import ServedFolder, salt
from kvfold.serve.vllm.scheduler import ContextLoad, EngineStep

logger = logging.getLogger("vllm.kvfold")

Of = TypeVar("Of", Layout, QueryTail)
# Contexts whose last, partly filled page is kept in memory. vLLM's prefix cache holds full pages
# only, so every further request to a context loads that page again.
REMEMBERED = 16


class WorkerSide:
    """Writes contexts into vLLM's cache on one of its tensor-parallel `ranks`.

    Pages hold `block` entries of dtype `dtype`.
    """

    def __init__(
        self,
        served_folder: ServedFolder | None,
        meta_model: MetaModel,
        dtype: torch.dtype,
        block: int,
        ranks: RankHeads,
    ) -> None:
        self.served_folder, self.meta_model = served_folder, meta_model
        self.dtype, self.block, self.ranks = dtype, block, ranks
        self.rope = meta_model.rope
        self._tails: OrderedDict[str, list[LayerPages]] = OrderedDict()
        self._layouts: dict[str, Layout] = {}
        self._rows: dict[str, EvictedRow] = {}
        self._ring = QueryRing(meta_model.layers)
        self._readers: dict[str, QueryTail] = {}
        self.done: dict[str, EvictionDone] = {}  # since vLLM was told last
        self._failing: set[str] = set()  # requests that could not be compressed, until they end

    def lay(self, step: EngineStep, layers: Mapping[int, Any]) -> list[int]:
        """Notes where requests have pages of single heads, and evicts from vLLM's `layers`.

        Blocks of requests from which nothing could be evicted are returned.
        """
        for name in step.gone:
            self._layouts.pop(name, None)
            self._rows.pop(name, None)
            self._failing.discard(name)
            self._unwatch(name)
        for name, own in step.laid.items():
            pages = own.pages.of_heads(self.ranks.own)
            self._layouts[name] = Layout.of(pages, own.blocks, own.replaced, Slabs.of(layers))
        self._failing |= {name for name in step.evictions if not self._evict(name, step, layers)}
        for name, count in step.watched.items():
            if count and name not in self._readers:
                self._readers[name] = self._ring.take(count)
        _name_blocks(RUNNING, self._layouts, step.writing)
        _name_blocks(WATCHED, self._readers, step.writing)
        # vLLM looks at blocks that held a token before the step: one that begins now fails later.
        return [block for block, name in step.writing.items() if name in self._failing]

    def _evict(self, name: str, step: EngineStep, layers: Mapping[int, Any]) -> bool:
        """Copies what stays of a request; False if that failed."""
        order = step.evictions[name]
        try:
            if name not in self._rows:
                self._rows[name] = EvictedRow(
                    order.eviction, layers, self.rope, self.block, self.ranks
                )
            row = self._rows[name]
            changed = row.evict(order, self._readers.get(name))
        # An exception here would end the engine with all its requests.
        except (KvfoldError, RuntimeError) as problem:
            logger.error("request %s could not be compressed: %s", name, problem)
            return False
        if order.eviction.every is None:
            self._unwatch(name)
        if changed and row.layout is not None:
            self._layouts[name] = row.layout
            self.done[name] = EvictionDone(order.admission, row.layout.replaced, row.blocks)
        return True

    def _unwatch(self, name: str) -> None:
        reader = self._readers.pop(name, None)
        if reader is not None:
            self._ring.give_back(reader)

    def fill(self, layers: Mapping[int, Any], load: ContextLoad) -> None:
        """Writes the entries of `load` into vLLM's attention `layers`, by layer index.

        Raises ContextFileError if the file was replaced since the request was scheduled, and
        KvfoldError if vLLM's layers or heads differ from the file's.
        """
        started = time.perf_counter()
        layout = None
        if load.pages is not None:
            own = load.pages.of_heads(self.ranks.own)
            layout = Layout.of(own, load.blocks, 0, Slabs.of(layers))
        for page in self._pages(load):
            if page.layer not in layers:
                raise KvfoldError(f"vLLM has no attention layer {page.layer}")
            slots = self._slots(page, load, layout)
            _write(layers[page.layer], page, slots, self.dtype)
        logger.info(
            "loaded %d of %d positions of %s in %.3f s",
            load.count - load.start,
            load.count,
            load.context,
            time.perf_counter() - started,
        )

    def _slots(self, page: LayerPages, load: ContextLoad, layout: Layout | None) -> Tensor:
        """vLLM's slots of a layer's last entries, int64: those that are not in its blocks yet."""
        if page.of_heads is not None:
            assert layout is not None
            there = load.start // self.block * layout.counts.numel()
            return layout.slots(page.layer, self.block, there)
        blocks, first = torch.tensor(load.blocks), max(load.start, load.count - len(page.keys))
        places = torch.arange(first, load.count)
        return blocks[places // self.block] * self.block + places % self.block

    def _pages(self, load: ContextLoad) -> Iterator[LayerPages]:
        """The entries of each layer in turn: all, or only those of the last, partial page.

        The latter come from memory. Raises ContextFileError if the file was replaced.
        """
        broken = load.count - load.count % self.block
        if load.start >= broken and load.salt in self._tails:
            self._tails.move_to_end(load.salt)
            yield from self._tails[load.salt]
            return
        tails = []
        assert self.served_folder is not None  # a context was scheduled
        with opened(self.served_folder.path(load.context)) as file, told_as_damage(file):
            counts = self.served_folder.counts(file)
            if salt(file.header) != load.salt or counts.count != load.count:
                raise ContextFileError(f"{file.path} was replaced meanwhile: ask again")
            for page in pages(file, self.meta_model, self.ranks.own, counts):
                if page.of_heads is None:
                    tails.append(_last(page, load.count - broken))
                yield page
        self._tails[load.salt] = tails
        while len(self._tails) > REMEMBERED:
            self._tails.popitem(last=False)


def _name_blocks(named: dict[int, Of], of: Mapping[str, Of], writing: Mapping[int, str]) -> None:
    """Makes `named` what requests have, by the blocks that they are `writing` into."""
    named.clear()
    named.update({block: of[name] for block, name in writing.items() if name in of})


def _last(page: LayerPages, count: int) -> LayerPages:
    """A copy of a layer's last `count` entries."""
    first = len(page.keys) - count
    return LayerPages(page.layer, page.keys[first:].clone(), page.values[first:].clone())


def _write(layer: Any, page: LayerPages, slots: Tensor, dtype: torch.dtype) -> None:
    """Writes the last `len(slots)` entries of a layer into vLLM's cache slots.

    Raises KvfoldError.
    """
    if not hasattr(layer.impl, "do_kv_cache_update"):
        raise KvfoldError(f"{type(layer.impl).__name__} fills its pages in the attention itself")
    held = layer.impl.num_kv_heads, layer.impl.head_size
    given = page.keys.shape[1] if page.of_heads is None else len(page.of_heads), page.keys.shape[2]
    if given != held:
        raise KvfoldError(
            f"layer {page.layer} holds {held[0]} heads of size {held[1]} on this rank, and the "
            f"context gives {given[0]} of size {given[1]}"
        )
    first, at = len(page.keys) - len(slots), layer.kv_cache.device
    keys, values = (part[first:].to(at, dtype).contiguous() for part in (page.keys, page.values))
    cache = layer.kv_cache if page.of_heads is None else all_pages(layer.kv_cache)
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots.to(at))
