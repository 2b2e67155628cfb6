# SPDX-License-Identifier: Apache-2.0
"""A compressed layer as named tensors and numbers, and back.

Nothing is saved of a turn that is still being read (remembered queries): there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.cache.columns import Logical
from kvfold.cache.layer import CompressedLayer
from kvfold.cache.state import PER_ENTRY
from kvfold.contexts.files.format import LayerPart
from kvfold.store.dense import DenseStore
from kvfold.store.encoding import Encode, Named
from kvfold.store.ragged import SegmentStore

# Beside the store: state of each head, and of the layer.
BY_HEAD, WHOLE = (*PER_ENTRY, "merging"), ("capacity", "error")


@dataclass(frozen=True)
class Described:
    """What a file holds of a layer: its numbers, tensors `[…]` of each KV head, and others."""

    part: LayerPart
    by_head: Named
    whole: dict[str, Tensor]


def describe(layer: CompressedLayer, index: int) -> Described:
    """One layer of a context, which is one row; its tensors are views."""
    store = layer.stored()
    by_head = store.named()
    if layer.sinks is not None:
        # How far sinks are moved depends on what follows.
        by_head["keys"] = list(layer.keys_as_given()[0])
    state = {name: getattr(layer, name) for name in (*BY_HEAD, *WHOLE)}
    by_head |= {name: list(state[name][0]) for name in BY_HEAD if state[name] is not None}
    whole = {name: state[name] for name in WHOLE if state[name] is not None}
    if layer.logical.valid is not None:
        whole["valid"] = layer.logical.valid
    segments = isinstance(store, SegmentStore)
    new, first_new = store.new if isinstance(store, SegmentStore) else (0, 0)
    part = LayerPart(
        index=index,
        store="segments" if segments else "dense",
        kept=kept(layer),
        dead=store.dead if isinstance(store, DenseStore) else 0,
        new=new,
        first_new=first_new,
        seen=layer.seen,
        turns=layer.turns,
        evicted_at=layer.evicted_at,
        surplus=layer.surplus,
        over_budget=layer.over_budget,
        by_head=sorted(by_head),
        whole=sorted(whole),
    )
    return Described(part, by_head, whole)


def restore(layer: CompressedLayer, saved: Described) -> None:
    """Makes a fresh layer the one that was described; tensors are copied."""
    part, whole, by_head = saved.part, saved.whole, dict(saved.by_head)
    state = {name: by_head.pop(name) for name in BY_HEAD if name in by_head}
    heads = len(next(iter(by_head.values())))
    if part.store == "dense":
        layer.store = DenseStore.from_named(by_head, heads, part.dead)
    else:
        encode = layer.plan.stages.encode or Encode()
        layer.store = SegmentStore.from_named(by_head, heads, encode, part.new, part.first_new)
    layer.dtype, layer.device = layer.store.keys.dtype, layer.store.keys.device
    layer.is_initialized = True
    for name, of_heads in state.items():
        setattr(layer, name, torch.stack(of_heads)[None])
    for name in WHOLE:
        setattr(layer, name, whole[name].clone() if name in whole else None)
    valid = whole.get("valid")
    layer.logical = Logical(part.seen, None if valid is None else valid.clone())
    layer.turns, layer.evicted_at, layer.settled = part.turns, part.evicted_at, part.seen
    layer.surplus, layer.over_budget = part.surplus, part.over_budget
    if layer.evicted_at:
        layer.let_sinks_move()


def kept(layer: CompressedLayer) -> list[int]:
    """Entries of each KV head of a layer with one row."""
    counts: list[int] = (layer.columns()[0] >= 0).sum(-1).tolist()
    return counts
