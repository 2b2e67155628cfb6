# SPDX-License-Identifier: Apache-2.0
"""How entries are stored once a turn has ended: as they came, packed, pruned, or in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

import torch
from torch import Tensor

from kvfold.methods.observation import Observation

if TYPE_CHECKING:
    from kvfold.kernels.triton.splits import Splits

# Threads share a segment's whole blocks equally; the last, broken one stays in the tail.
BLOCK = 16

# What a store holds, by name: one tensor for each segment
Named = dict[str, list[Tensor]]


class Encoded(Protocol):
    """Keys or values of several segments, one after the other; a segment is a row's KV head."""

    @property
    def lengths(self) -> list[int]:
        """Entries of each segment."""

    def segment(self, i: int) -> Tensor:
        """Entries `[lengths[i], D]`, decoded to the dtype they came in."""

    @property
    def rows(self) -> Tensor:
        """All entries `[sum of lengths, D]`, decoded together."""

    @property
    def segments(self) -> tuple[Tensor, ...]:
        """The same, segment by segment."""

    def extended(self, new: Self) -> Self:
        """Each segment followed by `new`'s; nothing is encoded a second time."""

    def select(self, segments: list[int]) -> Self:
        """A copy of these segments, in this order; one may come several times."""

    def tensors(self) -> list[Tensor]:
        """Everything it owns."""

    def named(self) -> Named:
        """Everything it owns, as views."""


@dataclass(frozen=True)
class Flat:
    """Entries as they came: `rows [sum of lengths, …]`."""

    rows: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, segments: list[Tensor]) -> Flat:
        """From each segment's entries `[n, …]`, which are copied."""
        return cls(torch.cat(segments), [len(segment) for segment in segments])

    @cached_property
    def segments(self) -> tuple[Tensor, ...]:
        """Each segment's entries."""
        return self.rows.split(self.lengths)

    @cached_property
    def _in_shares(self) -> dict[int, tuple[Tensor, ...]]:
        return {}

    def in_shares(self, shares: int) -> tuple[Tensor, ...]:
        """Each segment's entries in equal parts `[1, shares, n / shares, …]`."""
        known = self._in_shares
        if shares not in known:
            known[shares] = tuple(
                segment.view(1, shares, len(segment) // shares, *segment.shape[1:])
                for segment in self.segments
            )
        return known[shares]

    @cached_property
    def starts(self) -> Tensor:
        """Where each segment begins, and where the last one ends: int32, on the rows' device."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32).to(self.rows.device)

    @cached_property
    def splits(self) -> Splits:
        """How a GPU's programs share the segments."""
        from kvfold.kernels.triton.splits import Splits

        return Splits.of(self.lengths, device=self.rows.device)

    def segment(self, i: int) -> Tensor:
        return self.segments[i]

    def extended(self, new: Flat) -> Flat:
        both = zip(self.segments, new.segments, strict=True)
        rows = torch.cat([part for pair in both for part in pair])
        return Flat(rows, [a + b for a, b in zip(self.lengths, new.lengths, strict=True)])

    def select(self, segments: list[int]) -> Flat:
        return Flat.of([self.segments[i] for i in segments])

    def tensors(self) -> list[Tensor]:
        return [self.rows]

    def named(self) -> Named:
        return {"rows": list(self.segments)}


POSITION_BYTES = 4


@dataclass(frozen=True)
class EntrySize:
    """Numbers of a key and of a value, and bytes of a number."""

    key: int
    value: int
    number: int

    @property
    def whole(self) -> int:
        """Bytes of an entry as it came, and of its position."""
        return (self.key + self.value) * self.number + POSITION_BYTES


@dataclass(frozen=True)
class Encode:
    """How a layer's entries are stored; this one leaves them as they came, in whole blocks.

    Counts are of a segment's oldest entries; the newer ones wait outside, as they came.
    `as_they_came` says whether the older ones lie there so as well, and may be evicted by later
    turns, `pairs` whether two layers are encoded together.
    """

    as_they_came: ClassVar[bool] = True
    pairs: ClassVar[bool] = False

    def of_layer(self, layer: int, layers: int) -> Encode | None:
        """How the layer at this place is stored; None: as it came, without encoding."""
        return self

    def fitting(self, room: float, size: EntrySize) -> int:
        """Entries of a KV head that certainly fit into `room` bytes."""
        return int(room // size.whole)

    def key_count(self, entries: int, encoded: int, decoding: bool) -> int:
        """How many of `entries` keys are to be encoded, of which `encoded` are already."""
        return encoded if decoding else entries - entries % BLOCK

    def value_count(self, entries: int, encoded: int, decoding: bool) -> int:
        """How many of `entries` values are to be encoded, of which `encoded` are already."""
        return self.key_count(entries, encoded, decoding)

    def keys(
        self, segments: list[Tensor], seen: Observation | None, earlier: Encoded | None
    ) -> Encoded:
        """Each segment's keys `[n, D]`, to follow `earlier`; at a turn's end with what was seen."""
        return Flat.of(segments)

    def values(self, segments: list[Tensor]) -> Encoded:
        """Each segment's values `[n, Dv]`."""
        return Flat.of(segments)

    def keys_from(self, parts: Named, size: int) -> Encoded:
        """Copies of keys of head size `size` that were encoded so, from what they were named."""
        return Flat.of(parts["rows"])

    def values_from(self, parts: Named, size: int) -> Encoded:
        """The same of values."""
        return Flat.of(parts["rows"])
