# SPDX-License-Identifier: Apache-2.0
"""A decode step over a store in one launch of Triton's kernel, whatever its entries are.

References: plain torch's ways of `kernels.ragged`, `kernels.recalled` and `kernels.single_query`.
"""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.packing import PackedKeys, PackedValues, not_both_packed
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.kernels.recalled import RecalledKeys, RecalledValues
from kvfold.kernels.triton import Rectangle, Room, Segments, attend, plan_for
from kvfold.kernels.views import Flat, RaggedView

Beside = tuple[Rectangle | None, Room]  # raw entries of each segment, and where they are
Tail = tuple[Rectangle, Room]


def attend_to_view(
    query: Tensor, stored: RaggedView, mask: Tensor | None, **options: Unpack[LogitOptions]
) -> Tensor:
    """Attention output `[B, Hq, 1, Dv]` of `query [B, Hq, 1, D]` over all entries of the store.

    `mask`, bool or additive `[B, 1, 1, n]`, covers the last n entries, which are in every segment's
    tail. Nothing is read back to the host, but for which cold entries a query recalls.
    """
    rows = query.reshape(len(stored.keys.gaps), -1, query.shape[-1])
    old, beside, tail = _sources(rows, stored)
    lengths = ([0] * len(rows),) * 2 if old is None else old.lengths
    newest = tail[0] if mask is None else _hidden(tail[0], mask)
    plan = plan_for(*lengths, (beside[1], tail[1]), stored.keys.tail)
    out, _ = attend(rows, plan, old, (beside[0], newest), **options)
    return out.view(*query.shape[:3], -1)


def attend_to_visible(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    bias: Tensor | None,
    **options: Unpack[LogitOptions],
) -> Tensor:
    """As `single_query.attend_to_buffers`; of what is not visible nothing is read."""
    rows = query.reshape(keys.shape[0] * keys.shape[1], -1, query.shape[-1])
    biases = None if bias is None else bias.flatten(0, 1)
    tail = Rectangle(keys.flatten(0, 1), values.flatten(0, 1), biases, visible.flatten(0, 1))
    nothing, whole = [0] * len(rows), (0,) * len(rows)
    rooms = Room(0, whole), Room(keys.shape[2], whole)
    plan = plan_for(nothing, nothing, rooms, keys)
    out, _ = attend(rows, plan, None, (None, tail), **options)
    return out.view(*query.shape[:3], -1)


def _hidden(tail: Rectangle, mask: Tensor) -> Rectangle:
    """The rectangle without those of its last entries that a `mask [B or 1, 1, 1, n]` hides."""
    older, heads = tail.keys.shape[1] - mask.shape[-1], len(tail.keys) // len(mask)
    if mask.dtype == torch.bool:
        shown = F.pad(mask[:, 0, 0], (older, 0), value=True)
        return tail._replace(visible=shown.repeat_interleave(heads, 0))
    added = F.pad(mask[:, 0, 0].float(), (older, 0)).repeat_interleave(heads, 0)
    return tail._replace(bias=added if tail.bias is None else tail.bias + added)


def _sources(rows: Tensor, stored: RaggedView) -> tuple[Segments | None, Beside, Tail]:
    """Encoded entries; raw ones before the tail; and the tail. `rows [R, G, D]` are queries."""
    keys, values, gaps = stored.keys.encoded, stored.values.encoded, stored.keys.gaps
    none: Beside = None, Room(0, (0,) * len(gaps))
    if isinstance(keys, PackedKeys) and isinstance(values, PackedValues):
        # Entries whose key or value is still raw are few at any length.
        new_keys, new_values, gaps = not_both_packed(stored.keys, keys, stored.values, values)
        tail = Rectangle(new_keys, new_values), Room(new_keys.shape[1], gaps)
        return Segments(keys, values), none, tail
    biases = None if stored.bias is None else stored.bias.tail[..., 0].flatten(0, 1)
    tail = (
        Rectangle(stored.keys.tail.flatten(0, 1), stored.values.tail.flatten(0, 1), biases),
        Room(stored.keys.tail.shape[2], gaps),
    )
    if keys is None or values is None:
        return None, none, tail
    if isinstance(keys, RotatedKeys) and isinstance(values, TokenValues):
        return Segments(keys, values), _whole(keys, values), tail
    if isinstance(keys, RecalledKeys) and isinstance(values, RecalledValues):
        return Segments(keys.hot, values.hot), _recalled(rows, keys, values), tail
    assert isinstance(keys, Flat) and isinstance(values, Flat)
    bias = None if stored.bias is None else stored.bias.encoded
    assert bias is None or isinstance(bias, Flat)
    return Segments(keys, values, None if bias is None else bias.rows[:, 0]), none, tail


def _whole(keys: RotatedKeys, values: TokenValues) -> Beside:
    """Entries that are not quantized, as many in each segment."""
    count, segments = keys.whole.lengths[0], len(keys.whole.lengths)
    parts = (part.whole.rows.view(segments, count, -1) for part in (keys, values))
    return Rectangle(*parts) if count else None, Room(count, (0,) * segments)


def _recalled(rows: Tensor, keys: RecalledKeys, values: RecalledValues) -> Beside:
    """Cold entries that the queries `rows [R, G, D]` read, as codes of all find them."""
    counts = keys.counts()
    most = max(counts)
    room = Room(most, tuple([most - count for count in counts]))
    if not most:
        return None, room
    places = keys.wanted(rows[:, :, None])[:, 0]
    return Rectangle(keys.cold.take(places), values.cold.take(places)), room
