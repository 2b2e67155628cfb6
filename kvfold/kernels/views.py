# SPDX-License-Identifier: Apache-2.0
"""Views of a ragged store that kernels read: segments of raw or encoded entries, and a raw tail.

A segment is one row's KV head: segment `b·H + h` is row b's head h.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import ClassVar, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

# Entries of a block: threads share whole blocks equally; a broken last block stays in the tail.
BLOCK = 16

# A store's tensors by name: one for each segment
Named = dict[str, list[Tensor]]


@lru_cache(maxsize=64)
def int64_of(numbers: tuple[int, ...]) -> Tensor:
    """The numbers as a tensor, on the CPU."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


@lru_cache(maxsize=64)
def starts_of(lengths: tuple[int, ...]) -> Tensor:
    """First row of each segment `[R]`, int64, on the CPU."""
    return torch.tensor([0, *accumulate(lengths[:-1])], dtype=torch.int64, device="cpu")


class Form(NamedTuple):
    """Facts that a kernel must know of entries that it reads as they are encoded.

    `detail`: the dtype of what stands beside packed codes, or the whole entries of each segment
    where others were quantized one by one.
    """

    kind: Literal["none", "raw", "packed", "per token", "recalled", "other"]
    detail: torch.dtype | int | None = None


OTHER, NOTHING = Form("other"), Form("none")


class Encoded(Protocol):
    """Keys or values of several segments, raw or encoded; a segment is a row's KV head.

    Immutable: `extended` and `select` return new ones. Those that kernels read have a `form`.
    """

    @property
    def lengths(self) -> list[int]:
        """Entries of each segment."""

    def segment(self, i: int) -> Tensor:
        """Entries `[lengths[i], D]` of segment i, decoded to the model's dtype."""

    @property
    def rows(self) -> Tensor:
        """All entries `[sum of lengths, D]`, decoded together."""

    @property
    def segments(self) -> tuple[Tensor, ...]:
        """Entries `[lengths[i], D]` of every segment i, decoded together."""

    def extended(self, new: Self) -> Self:
        """Each segment followed by that of `new`; no entry is encoded a second time."""

    def select(self, segments: list[int]) -> Self:
        """A copy of these segments, in this order; an index may repeat."""

    def tensors(self) -> list[Tensor]:
        """All tensors, for counting bytes."""

    def named(self) -> Named:
        """All tensors by name, one for each segment, as views."""


class Standalone(ABC):
    """Encoded entries of which any may leave, as none needs another to be decoded."""

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """Entries of each segment."""

    @abstractmethod
    def kept(self, entries: list[Tensor]) -> Self:
        """A copy of the `entries`, int64 `[n]`, ascending, of each segment."""

    @abstractmethod
    def with_codes_of(self, other: Self, places: list[Tensor]) -> Self:
        """A copy whose entries have the codes of `other`'s at `places [n]` of each segment.

        Where that is below 0, and where one of the two has none, an entry stays as it is.
        """


@dataclass(frozen=True)
class Flat:
    """Raw entries `rows [sum of lengths, …]`, one segment after the other."""

    form: ClassVar[Form] = Form("raw")
    rows: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, segments: list[Tensor]) -> Flat:
        """A copy of each segment's entries `[n, …]`."""
        return cls(torch.cat(segments), [len(segment) for segment in segments])

    @cached_property
    def segments(self) -> tuple[Tensor, ...]:
        """Each segment's entries."""
        return self.rows.split(self.lengths)

    @cached_property
    def _in_shares(self) -> dict[int, tuple[Tensor, ...]]:
        return {}

    def in_shares(self, shares: int) -> tuple[Tensor, ...]:
        """Each segment's entries in equal shares `[1, shares, n / shares, …]`, as views."""
        known = self._in_shares
        if shares not in known:
            known[shares] = tuple(
                segment.view(1, shares, len(segment) // shares, *segment.shape[1:])
                for segment in self.segments
            )
        return known[shares]

    @cached_property
    def starts(self) -> Tensor:
        """First row of each segment, then the end of the last: int32 `[segments + 1]`."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32).to(self.rows.device)

    def segment(self, i: int) -> Tensor:
        """Entries `[lengths[i], …]` of segment i."""
        return self.segments[i]

    def extended(self, new: Flat) -> Flat:
        """Each segment followed by that of `new`, as a copy."""
        both = zip(self.segments, new.segments, strict=True)
        rows = torch.cat([part for pair in both for part in pair])
        return Flat(rows, [a + b for a, b in zip(self.lengths, new.lengths, strict=True)])

    def select(self, segments: list[int]) -> Flat:
        """A copy of these segments, in this order."""
        return Flat.of([self.segments[i] for i in segments])

    def tensors(self) -> list[Tensor]:
        """The rows of all segments."""
        return [self.rows]

    def named(self) -> Named:
        """The rows of each segment, as views."""
        return {"rows": list(self.segments)}


@dataclass(frozen=True)
class PartView:
    """Keys or values of all segments for one attention call; a later append does not change it.

    encoded: the oldest entries, None if there are none. tail `[B, H, T, D]`: the newest ones, raw;
    segment i owns all slots but the first `gaps[i]`.
    """

    encoded: Encoded | None
    tail: Tensor
    gaps: tuple[int, ...]

    @property
    def even(self) -> bool:
        """True if all segments have equally many encoded entries, and equally many in the tail."""
        lengths = [] if self.encoded is None else self.encoded.lengths
        return len(set(self.gaps)) == 1 and len(set(lengths)) <= 1

    @property
    def newest(self) -> Tensor:
        """Tail entries `[B·H, n, D]`; only for even segments."""
        return self.tail[:, :, self.gaps[0] :].flatten(0, 1)

    def rectangles(self) -> list[Tensor]:
        """All entries `[B·H, n, D]` in order, in one or two pieces; only for even segments."""
        tail = self.newest
        if self.encoded is None:
            return [tail]
        return [self.encoded.rows.view(len(tail), self.encoded.lengths[0], tail.shape[-1]), tail]

    def length(self, i: int) -> int:
        """Entries of segment i."""
        return (
            self.tail.shape[2]
            - self.gaps[i]
            + (0 if self.encoded is None else self.encoded.lengths[i])
        )

    def pieces(self, i: int) -> list[Tensor]:
        """All entries `[n, D]` of segment i in order, in one or two pieces."""
        heads = self.tail.shape[1]
        newest = self.tail[i // heads, i % heads, self.gaps[i] :]
        return [newest] if self.encoded is None else [self.encoded.segment(i), newest]

    def all_pieces(self) -> list[list[Tensor]]:
        """The pieces of every segment, decoded together."""
        heads = self.tail.shape[1]
        pieces = [[self.tail[i // heads, i % heads, gap:]] for i, gap in enumerate(self.gaps)]
        if self.encoded is None:
            return pieces
        return [[old, *new] for old, new in zip(self.encoded.segments, pieces, strict=True)]


@dataclass(frozen=True)
class RaggedView:
    """A ragged store for one attention call: segment `b·H + h` is row b's KV head h.

    The last `new` entries of every segment came after the last compression, padding included. All
    entries before them are tokens, and visible.
    """

    keys: PartView
    values: PartView
    new: int
    bias: PartView | None = None  # [·, 1] per entry, float32, added to its logits


class BiasedColumns(NamedTuple):
    """A dense store whose entries have a bias, for one attention call.

    columns `[B, H, T]`, −1 for holes, None while slot i is column i; bias `[B, H, T]`, float32.
    """

    columns: Tensor | None
    bias: Tensor
