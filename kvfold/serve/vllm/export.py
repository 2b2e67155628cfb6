# SPDX-License-Identifier: Apache-2.0
"""Entries of a context file for vLLM's pages, keys rotated.

To vLLM a context that takes M positions, of N tokens, is a prompt of M tokens, so a question starts
at position M instead of N. RoPE scores depend on distances only: every key is rotated by −(N − M)
positions, in float32.

Where all heads and layers keep M entries, each is a token of that prompt. Where they do not, each
head's entries fill pages of its own (`head_pages/`), and M is what the blocks of these pages hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.cache.state import PER_HEAD
from kvfold.contexts.files.coding import decoded
from kvfold.contexts.files.format import ContextFile, has_bias
from kvfold.contexts.files.header import Header, LayerHeader
from kvfold.errors import KvfoldError
from kvfold.kernels.views import Named
from kvfold.methods.base import parse
from kvfold.observers.of_layer import names_beside
from kvfold.serve.vllm.head_pages.layout import HeadPages
from kvfold.serve.vllm.meta_model import MetaModel
from kvfold.store.dense import DenseStore
from kvfold.store.encoding import Encode
from kvfold.store.ragged import RaggedStore


class UnevenContext(KvfoldError):
    """A context whose heads keep different numbers of entries, which do not fill pages.

    Pages of `size` entries would hold them; None: vLLM has no pages of single heads here.
    """

    def __init__(self, message: str, size: int | None = None) -> None:
        super().__init__(message)
        self.size = size


@dataclass(frozen=True)
class Paged:
    """What vLLM's pages hold: blocks of `block` entries, shared by `ranks` (tensor parallelism)."""

    block: int
    ranks: int = 1


@dataclass(frozen=True)
class EntryCounts:
    """Entries of a context in vLLM.

    Args:
        count: M, positions that the context takes.
        pages: pages of each layer and KV head, before the last tokens; None: M entries each.
        rest: with pages, the last tokens, which all heads keep beside them.
    """

    count: int
    pages: HeadPages | None = None
    rest: int = 0

    @classmethod
    def of(cls, header: Header, paged: Paged | None) -> EntryCounts:
        """Equal counts, or whole pages of `paged`; raises UnevenContext for others.

        None: vLLM cannot attend to pages of single heads here.
        """
        kept = [layer.kept for layer in header.layers]
        counts = [count for layer in kept for count in layer]
        if min(counts) == max(counts) > 0:
            return cls(counts[0])
        differ = f"heads keep {min(counts)} to {max(counts)} entries"
        if paged is None:
            raise UnevenContext(f"{differ}, and this vLLM holds as many of each head and layer")
        rest = header.seen % paged.block
        pages = HeadPages.of([[count - rest for count in layer] for layer in kept], paged.block)
        if pages is None:
            raise UnevenContext(
                f"{differ}, which do not fill pages of {paged.block}", size=paged.block
            )
        return cls(pages.blocks(paged.ranks) * paged.block + rest, pages, rest)


def votes(file: ContextFile) -> Tensor:
    """Number of heads, over all layers, that keep each token of the document: float32 `[N]`."""
    kept = torch.zeros(file.header.seen, dtype=torch.float32)
    for part in file.header.layers:
        name = "positions" if part.store == "dense" else "columns"
        if name not in part.by_head:
            kept += len(part.kept)
            continue
        for head in range(len(part.kept)):
            at = file.tensor(f"layers.{part.index}.{name}.{head}").long()
            kept[at[at >= 0]] += 1
        kept[part.first_new : part.first_new + part.new] += len(part.kept)
    return kept


def check_rest(file: ContextFile, counts: EntryCounts, size: int) -> None:
    """Raises UnevenContext unless all heads keep the last tokens, which fill no page of `size`."""
    heads = sum(len(layer.kept) for layer in file.header.layers)
    last = votes(file)[file.header.seen - counts.rest :]
    if bool((last < heads).any()):
        raise UnevenContext(
            f"heads do not all keep the last {counts.rest} tokens, which fill no page of {size}",
            size=size,
        )


# Tensors of a store without encoded entries.
PLAIN = {
    "dense": {"keys", "values", "positions"},
    "segments": {
        "columns", "keys.rows", "keys.tail", "values.rows", "values.tail",
    },
}  # fmt: skip


@dataclass(frozen=True)
class LayerEntries:
    """A layer as stored: keys, values `[H, T, D]`; `positions [H, T]`, −1 for holes."""

    keys: Tensor
    values: Tensor
    positions: Tensor


@dataclass(frozen=True)
class LayerPages:
    """Entries of a layer for vLLM: keys `[n, h, D]` float32, values `[n, h, Dv]`.

    Of all heads those of the last n positions. With `of_heads`, the pages of each head, what fills
    them, head after head as if of one.
    """

    layer: int
    keys: Tensor
    values: Tensor
    of_heads: tuple[int, ...] | None = None


def check_plain(file: ContextFile) -> None:
    """Raises KvfoldError for what vLLM cannot hold.

    That is quantized, pruned or paired entries, entries with a bias, layers other than full
    attention, and moved keys.
    """
    header = file.header
    if has_bias(header):
        raise KvfoldError(
            f"{header.method} gives entries an attention bias, which vLLM's pages have no place "
            "for: compress the document with match:bias=none,target=block"
        )
    beside = _beside(header.method)
    for saved in header.layers:
        foreign = set(saved.by_head) - PLAIN[saved.store] - beside
        if foreign:
            raise KvfoldError(
                f"{header.method} stores entries encoded ({', '.join(sorted(foreign))}), and "
                "vLLM's pages hold raw entries: compress the document without that, and "
                "choose vLLM's kv_cache_dtype to quantize"
            )
    if header.others:
        raise KvfoldError(
            f"layer {header.others[0].index} is a {header.others[0].kind}, which kvfold does not "
            "fill in vLLM: ask this context with kvfold's own server"
        )
    if header.rope.moved:
        raise KvfoldError(f"keys were moved by {header.rope.moved} positions already")


def _beside(method: str) -> set[str]:
    """Tensors beside the store of a method, which later evictions read and vLLM does not."""
    parse(method)  # whose module brings its observers, and with them their names
    return {*PER_HEAD, *names_beside()}


def entries(
    file: ContextFile, saved: LayerHeader, heads: range, coded: Mapping[str, Tensor]
) -> LayerEntries:
    """The stored entries of KV heads `heads` of a layer; `coded` are those that a codec holds."""

    def tensor(name: str) -> Tensor:
        return coded[name] if name in coded else file.tensor(name)

    names = [name for name in saved.by_head if name in PLAIN[saved.store]]
    by_head: Named = {
        name: [tensor(f"layers.{saved.index}.{name}.{head}") for head in heads] for name in names
    }
    store: DenseStore | RaggedStore
    if saved.store == "dense":
        store = DenseStore.from_named(by_head, len(heads), saved.dead)
        keys, values = store.keys, store.values
    else:
        store = RaggedStore.from_named(by_head, len(heads), Encode(), saved.new, saved.first_new)
        keys, values = store.dense()
    return LayerEntries(keys[0], values[0], store.columns[0])


def pages(
    file: ContextFile, meta_model: MetaModel, heads: slice, counts: EntryCounts
) -> Iterator[LayerPages]:
    """Entries of KV heads `heads`, layer by layer; raises what `check_plain` raises."""
    check_plain(file)
    header = file.header
    coded = decoded(file, dict(enumerate(meta_model.rotations)))
    for number, saved in enumerate(header.layers):
        held = entries(file, saved, range(len(saved.kept))[heads], coded)
        keys = meta_model.move(saved.index, held.keys, counts.count - header.seen)
        sinks = _moving_sinks(file, saved)
        if sinks:
            # As in the cache: sinks are moved up to the oldest recent token.
            first = (held.positions >= 0) & (held.positions < sinks)
            up = meta_model.move(saved.index, held.keys, counts.count - saved.kept[0])
            keys = torch.where(first[..., None], up, keys)
        there = held.positions >= 0
        if counts.pages is None:
            keys, values = (
                _last(part[there].unflatten(0, (-1, counts.count)), counts.count)
                for part in (keys, held.values)
            )
            yield LayerPages(saved.index, keys, values)
            continue
        rest = counts.rest
        there[:, there.shape[1] - rest :] = False
        own = counts.pages.of_layers[number][heads]
        yield LayerPages(saved.index, keys[there][:, None], held.values[there][:, None], own)
        yield LayerPages(saved.index, _last(keys, rest), _last(held.values, rest))


def _last(rows: Tensor, count: int) -> Tensor:
    """The last `count` of rows `[H, T, D]`, as `[count, H, D]`."""
    return rows[:, rows.shape[1] - count :].transpose(0, 1).contiguous()


def _moving_sinks(file: ContextFile, saved: LayerHeader) -> int:
    """Number of sinks whose keys the file holds unmoved, as the cache re-indexes positions."""
    if saved.store != "dense" or "positions" not in saved.by_head:
        return 0
    stages = parse(file.header.method).stages()
    return stages.forced.sinks if stages.positions == "reindex" else 0
