# SPDX-License-Identifier: Apache-2.0
"""Entries of a context file for vLLM's pages: equal counts per head, keys rotated.

To vLLM the M kept entries of N tokens are a prompt of M tokens, so a question starts at position M
instead of N. RoPE scores depend on distances only: every key is rotated by −(N − M) positions, in
float32.

A page of vLLM spans all KV heads of a layer, and a request has one length in all layers. Shorter
heads cannot be padded, as every entry has a weight in the softmax; so all heads are cut to the
shortest one. Context files hold no scores. Each head keeps the tokens that most heads keep, which
puts sinks and other forced tokens first.
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
from kvfold.methods.stages.select.top import top
from kvfold.observers.of_layer import names_beside
from kvfold.serve.vllm.meta_model import MetaModel
from kvfold.store.dense import DenseStore
from kvfold.store.encoding import Encode
from kvfold.store.ragged import RaggedStore

# Fraction of the kept entries that must remain: 0.8 preserves answers that 0.6 loses.
LEAST = 0.75


class UnevenContext(KvfoldError):
    """A context whose heads or layers keep numbers of entries that differ too much for pages."""


@dataclass(frozen=True)
class EntryCounts:
    """Entry counts of a context in vLLM.

    Args:
        count: M, positions that the context takes.
        lost: fraction of the file's entries that are dropped.
        layers: entries per KV head, layer by layer; fewer than `count` are at the last positions.
    """

    count: int
    lost: float
    layers: tuple[int, ...]

    @classmethod
    def of(cls, header: Header) -> EntryCounts:
        """The same count in every layer and head; raises UnevenContext if that loses too much."""
        count = min(count for layer in header.layers for count in layer.kept)
        return cls.checked(header, count, (count,) * len(header.layers))

    @classmethod
    def checked(cls, header: Header, count: int, layers: tuple[int, ...]) -> EntryCounts:
        """These counts; raises UnevenContext if they lose too much, or a layer had no entries."""
        counts = [count for layer in header.layers for count in layer.kept]
        pairs = zip(layers, header.layers, strict=True)
        remaining = sum(size * len(part.kept) for size, part in pairs) / max(1, sum(counts))
        if min(layers) == 0 or remaining < LEAST:
            raise UnevenContext(
                f"heads keep {min(counts)} to {max(counts)} entries, and vLLM holds equally many "
                f"of each head and layer: {1 - remaining:.0%} of them would be lost"
            )
        return cls(count, 1 - remaining, layers)


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


def voted(kept: Tensor, positions: Tensor, count: int) -> Tensor:
    """Indices `[H, count]`, ascending, of the entries whose tokens have most votes `kept [N]`.

    `positions [H, T]` are the entries' token numbers in the document, −1 for holes.
    """
    scores = kept[positions.clamp(min=0)].masked_fill(positions < 0, -1)
    return top(scores[None], torch.tensor([count]))[0]


# Tensors of a store without encoded entries.
PLAIN = {
    "dense": {"keys", "values", "positions"},
    "segments": {
        "columns", "keys.rows", "keys.tail", "values.rows", "values.tail",
    },
}  # fmt: skip
# Tensors beside a store, which later evictions read and vLLM does not.
BESIDE = {*PER_HEAD, *names_beside()}


@dataclass(frozen=True)
class LayerEntries:
    """A layer as stored: keys, values `[H, T, D]`; `positions [H, T]`, −1 for holes."""

    keys: Tensor
    values: Tensor
    positions: Tensor


@dataclass(frozen=True)
class LayerPages:
    """A layer for vLLM: keys `[M, H, D]` float32, values `[M, H, Dv]`."""

    layer: int
    keys: Tensor
    values: Tensor


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
    for saved in header.layers:
        foreign = set(saved.by_head) - PLAIN[saved.store] - BESIDE
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


def entries(
    file: ContextFile, saved: LayerHeader, heads: range, coded: Mapping[str, Tensor]
) -> LayerEntries:
    """The stored entries of KV heads `heads` of a layer; `coded` are those that a codec holds."""

    def tensor(name: str) -> Tensor:
        return coded[name] if name in coded else file.tensor(name)

    names = [name for name in saved.by_head if name not in BESIDE]
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
    """KV heads `heads` of each layer in turn; raises what `check_plain` raises."""
    check_plain(file)
    header = file.header
    kept = votes(file) if counts.lost else torch.zeros(header.seen, dtype=torch.float32)
    coded = decoded(file, dict(enumerate(meta_model.rotations)))
    for saved, count in zip(header.layers, counts.layers, strict=True):
        held = entries(file, saved, range(len(saved.kept))[heads], coded)
        keys = meta_model.move(saved.index, held.keys, counts.count - header.seen)
        sinks = _moving_sinks(file, saved)
        if sinks:
            # As in the cache: sinks are moved up to the oldest recent token.
            first = (held.positions >= 0) & (held.positions < sinks)
            up = meta_model.move(saved.index, held.keys, counts.count - saved.kept[0])
            keys = torch.where(first[..., None], up, keys)
        slots = voted(kept, held.positions, count)[..., None]
        yield LayerPages(saved.index, _chosen(keys, slots), _chosen(held.values, slots))


def _chosen(rows: Tensor, slots: Tensor) -> Tensor:
    """Rows `[H, T, D]` at indices `slots [H, M, 1]`, as `[M, H, D]`."""
    chosen = rows.gather(1, slots.expand(*slots.shape[:2], rows.shape[-1]))
    return chosen.transpose(0, 1).contiguous()


def _moving_sinks(file: ContextFile, saved: LayerHeader) -> int:
    """Number of sinks whose keys the file holds unmoved, as the cache re-indexes positions."""
    if saved.store != "dense" or "positions" not in saved.by_head:
        return 0
    stages = parse(file.header.method).stages()
    return stages.forced.sinks if stages.positions == "reindex" else 0
