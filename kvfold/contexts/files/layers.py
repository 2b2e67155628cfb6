# SPDX-License-Identifier: Apache-2.0
"""A compressed layer as named tensors and numbers, and back.

State of an unfinished prefill (the query window) is not saved: such a cache is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.cache.layer import CompressedLayer
from kvfold.cache.model_trial import EntryShape
from kvfold.cache.state import PER_HEAD, PER_ROW, LayerState
from kvfold.contexts.files.cold_rows import COLD, SUMS, FileRows, sums_of
from kvfold.contexts.files.header import LayerHeader
from kvfold.kernels.recalled import Recalled
from kvfold.kernels.views import Named, PartView
from kvfold.store.base import Store
from kvfold.store.dense import DenseStore
from kvfold.store.encoding import Encode
from kvfold.store.ragged import RaggedStore
from kvfold.store.recalled import Recalling
from kvfold.store.sequence import LogicalSequence

# Numbers that are saved and loaded under their own names.
NUMBERS = ("evicted_at", "surplus", "over_budget", "turn_end", "next_round")
REPORTS = ("error", "refit")  # what was measured of the entries


@dataclass(frozen=True)
class SavedLayer:
    """Content of a file for one layer.

    `header` has its numbers, `by_head[name]` one tensor per KV head, `whole[name]` a tensor of all.
    `cold[name]` stays in the file.
    """

    header: LayerHeader
    by_head: Named
    whole: dict[str, Tensor]
    cold: dict[str, FileRows] = field(default_factory=dict)


def describe(layer: CompressedLayer, index: int) -> SavedLayer:
    """The saved form of a layer of one row; its tensors are views."""
    state = layer.state
    store = state.stored()
    by_head = store.named()
    for name in [name for name in by_head if name.endswith(COLD)]:
        by_head[name.removesuffix(COLD) + SUMS] = [sums_of(rows) for rows in by_head[name]]
    if state.reindexed is not None:
        # Moved sinks are saved unmoved: how far they move depends on the tokens to come.
        by_head["keys"] = list(state.keys_as_given()[0])
    tensors = {name: getattr(state, name) for name in (*PER_HEAD, *PER_ROW)}
    by_head |= {name: list(tensors[name][0]) for name in PER_HEAD if tensors[name] is not None}
    for name, (numbers, _) in state.observers.numbers().items():
        by_head[name] = _without_padding(state, numbers[0])
    whole = {name: tensors[name] for name in PER_ROW if tensors[name] is not None}
    whole |= state.reports
    if state.sequence.valid is not None:
        whole["valid"] = state.sequence.valid
    of_heads, of_layer = state.observers.save(store.keys.shape[1])
    by_head |= of_heads
    whole |= of_layer
    for log in state.phase.logs.values() if state.plan.layer == 0 else ():
        whole |= log.save()  # what all layers share, in the first one
    new, first_new = store.new
    header = LayerHeader(
        index=index,
        store=store.kind,
        kept=kept(layer),
        dead=store.dead,
        new=new,
        first_new=first_new,
        seen=state.seen,
        turns=state.evictions,
        settled=None if state.settled == state.seen else state.settled,
        **{name: getattr(state, name) for name in NUMBERS},
        by_head=sorted(by_head),
        whole=sorted(whole),
    )
    return SavedLayer(header, by_head, whole)


def restore(layer: CompressedLayer, saved: SavedLayer) -> None:
    """Sets a fresh layer to a saved state; tensors are copied."""
    state, header, by_head = layer.state, saved.header, dict(saved.by_head)
    numbers = {name: by_head.pop(name) for name in state.observers.empties if name in by_head}
    tensors = {name: by_head.pop(name) for name in PER_HEAD if name in by_head}
    state.observers.load(by_head, saved.whole)
    for log in state.phase.logs.values() if state.plan.layer == 0 else ():
        log.load(saved.whole)
    valid = saved.whole.get("valid")
    sequence = LogicalSequence(header.seen, None if valid is None else valid.clone())
    state.put(_store(state, saved, by_head), sequence)
    layer.note_restored()
    for name, of_heads in numbers.items():
        empty = state.observers.empties[name]
        state.observers.set_numbers(name, _stacked(of_heads, empty)[None])
    of_rows = {name: saved.whole.get(name) for name in PER_ROW}
    state.restore(
        **{name: torch.stack(of_heads)[None] for name, of_heads in tensors.items()},
        **{name: None if held is None else held.clone() for name, held in of_rows.items()},
        reports={name: saved.whole[name].clone() for name in REPORTS if name in saved.whole},
        **{name: getattr(header, name) for name in NUMBERS},
        evictions=header.turns,
        settled=header.seen if header.settled is None else header.settled,
    )
    if state.evicted_at:
        state.let_sinks_move()


def check_restored(
    layer: CompressedLayer, counts: list[int], dtype: torch.dtype, shape: EntryShape | None
) -> None:
    """Raises ValueError for a layer that does not fit its header's `counts`, or the model.

    `dtype` is the model's, `shape` that of its layer's entries; None: it is not known. Encoded
    entries are decoded once, head by head.
    """
    store, columns, found = layer.state.stored(), layer.state.columns(), EntryShape.of(layer)
    if kept(layer) != counts:
        raise ValueError(f"{kept(layer)} entries per head, where the header lists {counts}")
    if columns.numel() and int(columns.max()) >= layer.state.seen:
        raise ValueError("an entry behind the last token")
    if shape is not None and found != shape:
        raise ValueError(f"{found}, where the model has {shape}")
    for count, (keys, values) in zip(counts, _of_heads(store), strict=True):
        if {each.dtype for each in (*keys, *values)} != {dtype}:
            raise ValueError(f"entries that are not of {dtype}")
        held = sum(map(len, keys)), sum(map(len, values))
        if not count <= held[0] == held[1]:
            raise ValueError(f"{held[0]} keys and {held[1]} values of {count} entries")
    for name, numbers in layer.state.reports.items():
        if not numbers.is_floating_point():
            raise ValueError(f"{name} of {numbers.dtype}")


def _of_heads(store: Store) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Keys `[n, D]` and values `[n, Dv]` of each segment, decoded, in one or two pieces."""
    if not isinstance(store, RaggedStore):
        keys, values = store.dense()
        for of_head in zip(keys.flatten(0, 1), values.flatten(0, 1), strict=True):
            yield [of_head[0]], [of_head[1]]
        return
    view = store.segments()
    for i in range(len(view.keys.gaps)):
        yield _pieces(view.keys, i), _pieces(view.values, i)


def _pieces(part: PartView, i: int) -> list[Tensor]:
    """As `PartView.pieces`, but cold entries are not read: a tensor without numbers is theirs."""
    if not isinstance(part.encoded, Recalled):
        return part.pieces(i)
    return [part.encoded.cold.like(i), *replace(part, encoded=None).pieces(i)]


def _without_padding(state: LayerState, numbers: Tensor) -> list[Tensor]:
    """Numbers of each head of `numbers [H, ≤ T]`, from a ragged store without the padding in front.

    So a head's numbers do not depend on how many entries other heads store.
    """
    if state.stored().is_dense:
        return list(numbers)
    padding = (state.columns()[0] < 0).sum(-1).tolist()
    return [of_head[count:] for of_head, count in zip(numbers, padding, strict=True)]


def _stacked(of_heads: list[Tensor], empty: float) -> Tensor:
    """Numbers of heads, `[H, T]`; shorter ones are filled up with `empty` on the left."""
    longest = max(len(of_head) for of_head in of_heads)
    padded = [F.pad(each, (longest - len(each), 0), value=empty) for each in of_heads]
    return torch.stack(padded)


def _store(state: LayerState, saved: SavedLayer, by_head: Named) -> DenseStore | RaggedStore:
    heads, header = len(next(iter(by_head.values()))), saved.header
    if header.store == DenseStore.kind:
        return DenseStore.from_named(by_head, heads, header.dead)
    encode = state.plan.stages.encode or Encode()
    if isinstance(encode, Recalling) and saved.cold:
        encode = replace(encode, filed=(saved.cold["keys.cold"], saved.cold["values.cold"]))
    return RaggedStore.from_named(by_head, heads, encode, header.new, header.first_new)


def kept(layer: CompressedLayer) -> list[int]:
    """Number of entries of each KV head `[H]`, of a layer with one row."""
    counts: list[int] = (layer.state.columns()[0] >= 0).sum(-1).tolist()
    return counts
