# SPDX-License-Identifier: Apache-2.0
"""How entries are stored once a turn has ended: as they came, packed, pruned, or in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from kvfold.kernels.views import BLOCK, Encoded, Flat, Named


class QueriedKeys(Protocol):
    """A layer's keys and the last queries to them, as `Observation` shows them to a method."""

    @property
    def keys(self) -> Tensor:
        """`[B, H, T, D]`."""

    @property
    def positions(self) -> Tensor:
        """`[B, H, T]`, −1 for padding."""

    @property
    def queries(self) -> Tensor | None:
        """`[B, Hq, W, D]`."""

    @property
    def query_positions(self) -> Tensor | None:
        """`[B, W]`, −1 for padding."""

    def group_mean(self, per_query_head: Tensor) -> Tensor:
        """`[B, Hq, …]` → `[B, H, …]`."""


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
    `raw` says whether the older ones lie there so as well, and may be evicted by later
    turns, `pairs` whether two layers are encoded together.
    """

    raw: ClassVar[bool] = True
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
        self, segments: list[Tensor], seen: QueriedKeys | None, earlier: Encoded | None
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
