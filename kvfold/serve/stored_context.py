# SPDX-License-Identifier: Apache-2.0
"""A context of the server, in memory or as a file."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from kvfold.cache.layer import CompressedLayer
from kvfold.cache.stats import Stats
from kvfold.contexts.context import Context
from kvfold.contexts.files import stock_layers as others
from kvfold.serve.longest_prefix import PrefixKey
from kvfold.serve.response_schemas import ContextDetail


@dataclass(eq=False)
class StoredContext:
    """A context and its state in the server; everything but `context` is known on disk, too.

    Args:
        id: the id that requests name.
        stats: kept entries and bytes, as of the compressed document.
        size: bytes in memory.
        keys: prefix keys by kind: of its tokens, and of its text up to the question.
        context: None while it is only on disk.
        file: None until it was written; holds the context as it was before it shrank.
        created: Unix time in seconds.
        readers: requests that use it.
        moving: a thread is writing or reading the file, or shrinks the context.
        shrunk: the context in memory has shrunk, or cannot.
    """

    id: str
    stats: Stats
    size: int
    keys: dict[str, PrefixKey]
    context: Context | None
    file: Path | None
    created: int = field(default_factory=lambda: int(time.time()))
    readers: int = 0
    moving: bool = False
    shrunk: bool = False

    @property
    def idle(self) -> bool:
        """True if no request uses it and no thread moves it."""
        return not self.readers and not self.moving

    def info(self, model: str) -> ContextDetail:
        """The JSON of `GET /v1/contexts/{id}`."""
        return ContextDetail(
            id=self.id,
            created=self.created,
            model=model,
            method=self.stats.method,
            budget=self.stats.budget,
            tokens=self.stats.seen,
            kept=self.stats.kept_fraction,
            bytes=self.size,
            bytes_full=self.stats.nbytes_full,
            place="disk" if self.context is None else "memory",
            readers=self.readers,
            kept_per_layer=[rows[0] for rows in self.stats.kept],
        )


def size_of(context: Context) -> int:
    """Bytes of all tensors of a context: compressed layers, transformers' layers, token ids.

    Transformers' layers count by storage: a sliding window may be a view of a longer buffer.
    """
    storages = {}
    for index, layer in enumerate(context.cache.layers):
        if not isinstance(layer, CompressedLayer):
            _, by_head, whole = others.describe(layer, index)
            for tensor in (
                *whole.values(),
                *(head for heads in by_head.values() for head in heads),
            ):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    stats = context.stats()
    return stats.nbytes + stats.id_bytes + context.ids.nbytes + sum(storages.values())
