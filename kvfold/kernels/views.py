# SPDX-License-Identifier: Apache-2.0
"""What kernels read of a ragged store: segments of raw or encoded entries, and a raw tail.

A segment is one row's KV head: segment `b·H + h` is row b's head h.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class PartView:
    """What one attention call reads of a part; it stays as it is when the part goes on."""

    encoded: Encoded | None
    tail: Tensor
    alive: list[int]

    @property
    def even(self) -> bool:
        """Whether all segments have equally many encoded entries, and newer ones."""
        lengths = [] if self.encoded is None else self.encoded.lengths
        return len(set(self.alive)) == 1 and len(set(lengths)) <= 1

    @property
    def newest(self) -> Tensor:
        """The entries `[B·H, n, D]` of even segments that are not encoded."""
        return self.tail[:, :, self.tail.shape[2] - self.alive[0] :].flatten(0, 1)

    def rectangles(self) -> list[Tensor]:
        """The entries `[B·H, n, D]` of even segments in order, in one or two pieces."""
        tail = self.newest
        if self.encoded is None:
            return [tail]
        return [self.encoded.rows.view(len(tail), self.encoded.lengths[0], tail.shape[-1]), tail]

    def length(self, i: int) -> int:
        """Entries of segment i."""
        return self.alive[i] + (0 if self.encoded is None else self.encoded.lengths[i])

    def pieces(self, i: int) -> list[Tensor]:
        """Segment i's entries `[n, D]` in order, in one or two pieces."""
        heads, width = self.tail.shape[1:3]
        newest = self.tail[i // heads, i % heads, width - self.alive[i] :]
        return [newest] if self.encoded is None else [self.encoded.segment(i), newest]

    def all_pieces(self) -> list[list[Tensor]]:
        """The pieces of every segment, decoded together."""
        heads, width = self.tail.shape[1:3]
        pieces = [
            [self.tail[i // heads, i % heads, width - alive :]]
            for i, alive in enumerate(self.alive)
        ]
        if self.encoded is None:
            return pieces
        return [[old, *new] for old, new in zip(self.encoded.segments, pieces, strict=True)]


@dataclass(frozen=True)
class RaggedView:
    """What one attention call reads: segment `b·H + h` is row b's KV head h.

    The last `new` entries of every segment are columns that came after the last compression,
    padding included; all before them are tokens, and visible.
    """

    keys: PartView
    values: PartView
    new: int
