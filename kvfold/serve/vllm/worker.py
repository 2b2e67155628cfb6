# SPDX-License-Identifier: Apache-2.0
"""Worker side of the connector: writes the rank's KV heads of a context into its pages."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kvfold.contexts.files.format import opened, told_as_damage
from kvfold.errors import ContextFileError, KvfoldError
from kvfold.serve.vllm.export import LayerPages, pages
from kvfold.serve.vllm.meta_model import MetaModel
from kvfold.serve.vllm.placeholders import ServedFolder, salt
from kvfold.serve.vllm.scheduler import ContextLoad

logger = logging.getLogger("vllm.kvfold")

# Contexts whose last, partly filled page is kept in memory. vLLM's prefix cache holds full pages
# only, so every further request to a context loads that page again.
REMEMBERED = 16


def share(heads: int, rank: int, size: int) -> slice:
    """The KV heads of a tensor-parallel rank, split or replicated as vLLM does.

    Raises KvfoldError if neither number divides the other.
    """
    if heads % size == 0:
        each = heads // size
        return slice(rank * each, (rank + 1) * each)
    if size % heads == 0:
        head = rank * heads // size
        return slice(head, head + 1)
    raise KvfoldError(f"{heads} KV heads cannot be dealt out to {size} ranks")


class WorkerSide:
    """Writes contexts into vLLM's cache on tensor-parallel rank `rank` of `size`.

    Pages hold `block` entries of dtype `dtype`.
    """

    def __init__(
        self,
        served_folder: ServedFolder,
        meta_model: MetaModel,
        dtype: torch.dtype,
        block: int,
        rank: int,
        size: int,
    ) -> None:
        self.served_folder, self.meta_model = served_folder, meta_model
        self.dtype, self.block, self.rank, self.size = dtype, block, rank, size
        self._tails: OrderedDict[str, list[LayerPages]] = OrderedDict()

    def fill(self, layers: Mapping[int, Any], load: ContextLoad) -> None:
        """Writes the entries of `load` into vLLM's attention `layers`, keyed by layer index.

        Raises ContextFileError if the file was replaced since the request was scheduled, and
        KvfoldError if vLLM's layers or heads differ from the file's.
        """
        started = time.perf_counter()
        count = load.start + len(load.slots)
        for page in self._pages(load, count):
            if page.layer not in layers:
                raise KvfoldError(f"vLLM has no attention layer {page.layer}")
            slots = load.by_layer.get(page.layer, load.slots)
            _write(layers[page.layer], page, slots, self.dtype)
        logger.info(
            "loaded %d of %d entries of %s in %.3f s",
            len(load.slots),
            count,
            load.context,
            time.perf_counter() - started,
        )

    def _pages(self, load: ContextLoad, count: int) -> Iterator[LayerPages]:
        """The entries of each layer in turn: all `count`, or only those of the last, partial page.

        The latter come from memory. Raises ContextFileError if the file was replaced.
        """
        broken = count - count % self.block
        if load.start >= broken and load.salt in self._tails:
            self._tails.move_to_end(load.salt)
            yield from self._tails[load.salt]
            return
        tails = []
        with opened(self.served_folder.path(load.context)) as file, told_as_damage(file):
            counts = self.served_folder.counts(file.header)
            if salt(file.header) != load.salt or counts.count != count:
                raise ContextFileError(f"{file.path} was replaced meanwhile: ask again")
            heads = share(len(file.header.layers[0].kept), self.rank, self.size)
            for page in pages(file, self.meta_model, heads, counts):
                tails.append(_from(page, broken))
                yield page
        self._tails[load.salt] = tails
        while len(self._tails) > REMEMBERED:
            self._tails.popitem(last=False)


def _from(page: LayerPages, first: int) -> LayerPages:
    """A copy of a layer's entries from index `first` on."""
    return LayerPages(page.layer, page.keys[first:].clone(), page.values[first:].clone())


def _write(layer: Any, page: LayerPages, slots: list[int], dtype: torch.dtype) -> None:
    """Writes the last `len(slots)` entries of a layer into vLLM's cache slots.

    Raises KvfoldError.
    """
    first = len(page.keys) - len(slots)
    keys, values = page.keys[first:], page.values[first:]
    if not hasattr(layer.impl, "do_kv_cache_update"):
        raise KvfoldError(f"{type(layer.impl).__name__} fills its pages in the attention itself")
    held = (layer.impl.num_kv_heads, layer.impl.head_size)
    if tuple(keys.shape[1:]) != held:
        raise KvfoldError(
            f"layer {page.layer} holds {held[0]} heads of size {held[1]} on this rank, and the "
            f"context gives {keys.shape[1]} of size {keys.shape[2]}"
        )
    at = layer.kv_cache.device
    keys, values = (part.to(at, dtype).contiguous() for part in (keys, values))
    layer.impl.do_kv_cache_update(
        layer, keys, values, layer.kv_cache, torch.tensor(slots, device=at)
    )
