# SPDX-License-Identifier: Apache-2.0
"""Attention to entries most of which are cold: codes of their keys say which a query reads.

Each KV head reads for each query the cold entries whose codes give the largest product with any of
the group's query heads, the lowest column first among equals; and all hot ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.cold import Cold
from kvfold.kernels.dispatch import KNOWN, packed_path
from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.native import attention as native
from kvfold.kernels.per_token import RotatedKeys
from kvfold.kernels.segment_parts import attended, hidden_slots, joined, newest_of, softmax
from kvfold.kernels.views import Flat, Form, Named, PartView, RaggedView, Standalone

QUERIES = 16  # most of one block: each reads entries of its own
BLOCK_BYTES = 64 * 2**20  # of the keys that a block reads
ROUNDING = 1e-9  # of a share's product with a number of entries


@dataclass(frozen=True)
class Recalled(Standalone):
    """Keys or values `[n, D]` of each segment: all are `cold`, copies of a few are hot.

    places `[sum]`, int64, ascending in each segment, are those of the `hot` rows `[sum, D]`.
    """

    form: ClassVar[Form] = Form("recalled")
    cold: Cold
    places: Flat
    hot: Flat

    @property
    def lengths(self) -> list[int]:
        return self.cold.lengths

    @property
    def rows(self) -> Tensor:
        """All entries `[sum of lengths, D]`."""
        return torch.cat(self.segments)

    @property
    def segments(self) -> tuple[Tensor, ...]:
        """All entries `[n, D]` of every segment."""
        return tuple(self.segment(i) for i in range(len(self.lengths)))

    def segment(self, i: int) -> Tensor:
        """All entries `[n, D]` of segment i."""
        return self.cold.segment(i)

    def warmed(self, places: list[Tensor]) -> Self:
        """Other hot entries: those at `places [m]`, int64, ascending, of each segment."""
        hot = Flat.of([self.cold.segment(i)[at] for i, at in enumerate(places)])
        return dataclasses.replace(self, places=Flat.of(places), hot=hot)

    def is_hot(self) -> list[Tensor]:
        """Bool mask `[n]` of each segment's hot entries."""
        masks = [torch.zeros(n, dtype=torch.bool, device=self.cold.device) for n in self.lengths]
        for mask, at in zip(masks, self.places.segments, strict=True):
            mask[at] = True
        return masks

    def extended(self, new: Self) -> Self:
        """Each segment followed by that of `new`, whose hot entries stay hot."""
        moved = zip(new.places.segments, self.lengths, strict=True)
        places = Flat.of([at + count for at, count in moved])
        return dataclasses.replace(
            self,
            cold=self.cold.extended(new.cold),
            places=self.places.extended(places),
            hot=self.hot.extended(new.hot),
        )

    def select(self, segments: list[int]) -> Self:
        """A copy of these segments, in this order."""
        return dataclasses.replace(
            self,
            cold=self.cold.select(segments),
            places=self.places.select(segments),
            hot=self.hot.select(segments),
        )

    def kept(self, entries: list[Tensor]) -> Self:
        hot = [mask[at].nonzero()[:, 0] for mask, at in zip(self.is_hot(), entries, strict=True)]
        return dataclasses.replace(self, cold=self.cold.kept(entries)).warmed(hot)

    def with_codes_of(self, other: Self, places: list[Tensor]) -> Self:
        return dataclasses.replace(self, cold=self.cold.with_codes_of(other.cold, places))

    def tensors(self) -> list[Tensor]:
        """All that is hot."""
        return [self.places.rows, self.hot.rows]

    def named(self) -> Named:
        """All tensors by name, one for each segment, cold entries included."""
        return self.cold.named() | {
            "places": list(self.places.segments),
            "hot": list(self.hot.segments),
        }


@dataclass(frozen=True)
class RecalledKeys(Recalled):
    """Keys of which a query reads `read`: a share up to 1, or that many; `codes` of all are hot."""

    codes: RotatedKeys
    read: float

    def extended(self, new: Self) -> Self:
        both = super().extended(new)
        return dataclasses.replace(both, codes=self.codes.extended(new.codes))

    def select(self, segments: list[int]) -> Self:
        return dataclasses.replace(super().select(segments), codes=self.codes.select(segments))

    def kept(self, entries: list[Tensor]) -> Self:
        return dataclasses.replace(super().kept(entries), codes=self.codes.kept(entries))

    def with_codes_of(self, other: Self, places: list[Tensor]) -> Self:
        codes = self.codes.with_codes_of(other.codes, places)
        return dataclasses.replace(super().with_codes_of(other, places), codes=codes)

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *self.codes.tensors()]

    def named(self) -> Named:
        return super().named() | self.codes.named()

    def counts(self) -> list[int]:
        """Cold entries of each segment that a query reads."""
        lengths = zip(self.lengths, self.places.lengths, strict=True)
        return [reads(self.read, count - hot) for count, hot in lengths]

    def wanted(self, query: Tensor) -> Tensor:
        """Places `[R, S, K]`, ascending, that `query [R, G, S, D]` reads; −1 on the left."""
        return by_codes(self.codes, self.places.segments, self.counts(), query)


@dataclass(frozen=True)
class RecalledValues(Recalled):
    """Values of entries."""


def by_codes(
    codes: RotatedKeys, hot: Sequence[Tensor], counts: Sequence[int], query: Tensor
) -> Tensor:
    """Places `[R, S, K]`, ascending, that `query [R, G, S, D]` reads beside the `hot [m]` ones.

    These are each segment's `counts` of highest product with their codes; −1 on the left.
    """
    asked, most = codes.asked(query), max(counts)
    found = query.new_full((len(query), query.shape[2], most), -1, dtype=torch.long)
    for i, count in enumerate(counts):
        of_segment = query[i].flatten(0, 1), asked[i].flatten(0, 1)
        products = codes.products_of(i, *of_segment).unflatten(0, query.shape[1:3])
        highest = products.amax(0).index_fill(1, hot[i], -torch.inf)
        order = highest.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        found[i, :, most - count :] = order.sort(-1).values
    return found


def reads(read: float, cold: int) -> int:
    """Entries that a query reads of `cold` ones: a share up to 1 rounded up, or that many."""
    return math.ceil(read * cold - ROUNDING) if read <= 1 else min(int(read), cold)


def attend_to_recalled(
    query: Tensor, stored: RaggedView, mask: Tensor | None, options: LogitOptions
) -> Tensor:
    """Output `[B, Hq, S, Dv]` of `query [B, Hq, S, D]`; `mask` as of `attend_to_segments`."""
    keys, values = stored.keys.encoded, stored.values.encoded
    assert isinstance(keys, RecalledKeys) and isinstance(values, RecalledValues)
    segments, queries = len(keys.lengths), query.shape[2]
    mask = None if mask is None else _of_tail(mask, stored.keys.tail.shape[2])
    if mask is None and _is_native(query, keys, values):
        return _native_step(query, stored, keys, values, options)
    grouped = query.reshape(segments, -1, queries, query.shape[-1])
    always = _always(stored.keys, keys.hot), _always(stored.values, values.hot)
    hidden = _hidden(stored.keys, keys.hot, query.dtype)
    sinks = options.get("sink_logits")
    if sinks is not None:
        sinks = sinks.view(-1, grouped.shape[1]).repeat(len(query), 1)
    outs = []
    each = segments * max(keys.counts()) * query.shape[-1] * query.element_size()
    at_once = max(1, min(QUERIES, BLOCK_BYTES // max(1, each)))
    for start in range(0, queries, at_once):
        block = grouped[:, :, start : start + at_once]
        places = keys.wanted(block)
        recalled = keys.cold.take(places)
        # Products of queries and keys may exceed float16 before they are scaled.
        scaled = block * options["scale"]
        logits = torch.cat(
            [
                torch.einsum("rgsd,rskd->rgsk", scaled, recalled),
                scaled @ always[0][:, None].transpose(-1, -2),
            ],
            -1,
        )
        softcap = options.get("softcap")
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        count = places.shape[-1]
        logits[..., :count].masked_fill_((places < 0)[:, None], -torch.inf)
        logits[..., count:].add_(hidden[:, None, None])
        _hide_new(logits, mask, queries, start, len(query))
        weights = _weights(logits, sinks).to(query.dtype)
        mixed = torch.einsum("rgsk,rskd->rgsd", weights[..., :count], values.cold.take(places))
        outs.append(mixed + weights[..., count:] @ always[1][:, None])
    return torch.cat(outs, 2).reshape(*query.shape[:3], -1)


def _is_native(query: Tensor, keys: RecalledKeys, values: RecalledValues) -> bool:
    """True for a step that the C++ takes: one query of each row, and codes without means.

    It reads keys and values by the same numbers of rows.
    """
    dtype = keys.hot.rows.dtype
    known = packed_path(query) == "native" and dtype in KNOWN
    return known and keys.codes.means is None and keys.cold.alike(values.cold)


def _native_step(
    query: Tensor,
    stored: RaggedView,
    keys: RecalledKeys,
    values: RecalledValues,
    options: LogitOptions,
) -> Tensor:
    """As `attend_to_recalled` for one query of each row; the tail is attended to by torch."""
    scale, softcap, counts = options["scale"], options.get("softcap"), keys.counts()
    rows = query.reshape(len(counts), -1, query.shape[-1])
    pieces = keys.cold.old.lengths, keys.cold.new.starts
    at, read = native.find_cold(rows, keys.codes, keys.places, counts, *pieces)
    old_keys, new_keys, numbers = keys.cold.pieces(at)
    old_values, new_values, _ = values.cold.pieces(at)
    for part in (keys, values):
        part.cold.note(sum(counts))
    of_keys = old_keys, new_keys, keys.hot.rows
    of_values = old_values, new_values, values.hot.rows
    old = native.attend_to_rows(rows, of_keys, of_values, numbers, read, scale, softcap)
    tail = attended(rows, *newest_of(stored), scale, softcap)
    return joined(query, old, tail, options.get("sink_logits"))


def _weights(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of `logits [R, G, S, n]`; sink logits `[R, G]` join the denominator only."""
    by_head = None if sinks is None else sinks.flatten()
    return softmax(logits.flatten(0, 1), by_head).unflatten(0, logits.shape[:2])


def _always(part: PartView, hot: Flat) -> Tensor:
    """Hot entries and the tail `[R, m + T, D]`; shorter segments begin with zeros."""
    tail, most = part.tail.flatten(0, 1), max(hot.lengths)
    if min(hot.lengths) == most:
        return torch.cat([hot.rows.view(len(tail), most, tail.shape[-1]), tail], 1)
    padded = tail.new_zeros(len(tail), most, tail.shape[-1])
    for into, rows in zip(padded, hot.segments, strict=True):
        into[most - len(rows) :] = rows
    return torch.cat([padded, tail], 1)


def _hidden(part: PartView, hot: Flat, dtype: torch.dtype) -> Tensor:
    """Additive mask `[R, m + T]` of what `_always` fills up with zeros, and of the tail's gaps."""
    most, tail = max(hot.lengths), part.tail
    missing = tuple(most - count for count in hot.lengths)
    return torch.cat(
        [
            hidden_slots(missing, most, dtype, tail.device),
            hidden_slots(part.gaps, tail.shape[2], dtype, tail.device),
        ],
        1,
    )


def _of_tail(mask: Tensor, tail: int) -> Tensor:
    """The part of a `mask [B, 1 or Hq, S, n]` that is of the tail; raises KvfoldError for others.

    Cold entries that a mask hides cannot be left out of what is read.
    """
    older = mask[..., : max(0, mask.shape[-1] - tail)]
    if not bool((older if mask.dtype == torch.bool else older == 0).all()):
        raise KvfoldError(
            "the attention mask hides entries that recall has let go cold: leave these columns "
            "visible, or choose another method"
        )
    return mask[..., older.shape[-1] :]


def _hide_new(logits: Tensor, mask: Tensor | None, queries: int, start: int, rows: int) -> None:
    """Hides in `logits [R, G, s, n]`, in place, what queries from `start` on may not see.

    `mask`, bool or additive `[B, 1 or Hq, S, m]`, is of the last m entries; None: causal.
    """
    block = logits.shape[2]
    if mask is None:
        if queries > 1:
            slot = torch.arange(queries, device=logits.device)
            later = slot > slot[start : start + block, None]
            logits[..., logits.shape[-1] - queries :].masked_fill_(later, -torch.inf)
        return
    width = mask.shape[-1]
    if not width:
        return
    part = logits[..., logits.shape[-1] - width :].unflatten(0, (rows, -1))  # [B, H, G, s, m]
    shown = mask[:, :, start : start + block]
    of_heads = shown.unflatten(1, (part.shape[1], -1)) if shown.shape[1] > 1 else shown[:, None]
    if mask.dtype == torch.bool:
        part.masked_fill_(~of_heads, -torch.inf)
    else:
        part.add_(of_heads)
