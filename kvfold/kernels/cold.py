# SPDX-License-Identifier: Apache-2.0
"""`Cold`: raw entries outside of the model's memory, of which a query reads few."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kvfold.kernels.cold_bytes import ColdBytes
from kvfold.kernels.views import Flat, starts_of

PIECE = 48  # bits of a row's number, before that of its piece


class ColdRows(Protocol):
    """Rows of several segments, in host memory or in a file."""

    @property
    def lengths(self) -> list[int]:
        """Rows of each segment."""

    def at(self, segments: Tensor, places: Tensor) -> Tensor:
        """The rows `[n, D]` at `places [n]` of these `segments [n]`, on the CPU."""

    def segment(self, i: int) -> Tensor:
        """All rows `[n, D]` of segment i, on the CPU."""

    def select(self, segments: list[int]) -> ColdRows:
        """These segments, in this order."""

    def nbytes(self) -> ColdBytes:
        """Bytes of the rows."""


@dataclass(frozen=True)
class HostRows:
    """Rows in host memory, pinned where the model is on a GPU."""

    flat: Flat

    @classmethod
    def of(cls, segments: list[Tensor]) -> HostRows:
        """A copy of each segment's rows `[n, D]`."""
        rows = torch.cat(segments)
        host = rows.cpu()
        flat = Flat(host.pin_memory() if rows.is_cuda else host, [len(s) for s in segments])
        return cls(flat)

    @property
    def lengths(self) -> list[int]:
        return self.flat.lengths

    def at(self, segments: Tensor, places: Tensor) -> Tensor:
        return self.flat.rows.index_select(0, starts_of(tuple(self.lengths))[segments] + places)

    def segment(self, i: int) -> Tensor:
        return self.flat.segments[i]

    def select(self, segments: list[int]) -> HostRows:
        return HostRows(self.flat.select(segments))

    def nbytes(self) -> ColdBytes:
        return ColdBytes(self.flat.rows.numel() * self.flat.rows.element_size())


class Moved:
    """Bytes of cold entries that queries have read; shared by copies of one layer's store."""

    nbytes = 0


@dataclass(frozen=True)
class Cold:
    """Raw entries `[n, D]` of each segment: `old` ones, then the `new` ones that left the tail.

    Immutable but for `moved`. `device` is the model's.
    """

    old: ColdRows
    new: HostRows
    device: torch.device
    moved: Moved = field(default_factory=Moved)

    @classmethod
    def of(cls, segments: list[Tensor]) -> Cold:
        """A copy of each segment's entries `[n, D]`."""
        return cls(HostRows.of(segments), _none_like(segments), segments[0].device)

    @property
    def lengths(self) -> list[int]:
        """Entries of each segment."""
        return [a + b for a, b in zip(self.old.lengths, self.new.lengths, strict=True)]

    def take(self, places: Tensor) -> Tensor:
        """Entries `[R, …, D]` at `places [R, …]` of R segments; zeros where that is below 0."""
        at, like = places.flatten().cpu(), self.new.flat.rows
        segments = torch.arange(len(places)).repeat_interleave(at.numel() // len(places))
        first = torch.tensor(self.old.lengths)[segments]
        rows = like.new_zeros(len(at), like.shape[1])
        old, new = (at >= 0) & (at < first), (at >= first) & (at >= 0)
        for piece, own, places_in in ((self.old, old, at), (self.new, new, at - first)):
            if own.any():
                rows[own] = piece.at(segments[own], places_in[own])
        self.note(int((at >= 0).sum()))
        return rows.to(self.device).unflatten(0, places.shape)

    @classmethod
    def filed(cls, old: ColdRows, device: torch.device, size: int, dtype: torch.dtype) -> Cold:
        """The `old` entries of a file, of `size` numbers each, for a model on a `device`."""
        nothing = [torch.empty(0, size, dtype=dtype)] * len(old.lengths)
        return cls(old, HostRows.of(nothing), device)

    def pieces(self, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows `[·, D]` of old and of new entries, and the numbers `at` of those that are read.

        These are of `native.attention.find_cold`; of a file, only the rows are there that they
        name, which have other numbers then.
        """
        if isinstance(self.old, HostRows):
            return self.old.flat.rows, self.new.flat.rows, at
        own = (at >> PIECE == 0).nonzero()[:, 0]
        starts, rows = starts_of(tuple(self.old.lengths)), at[own]
        segments = torch.searchsorted(starts, rows, right=True) - 1
        found = self.old.at(segments, rows - starts[segments])
        return found, self.new.flat.rows, at.index_copy(0, own, torch.arange(len(own)))

    def note(self, entries: int) -> None:
        """Notes that queries have read so many entries."""
        rows = self.new.flat.rows
        self.moved.nbytes += entries * rows.shape[1] * rows.element_size()

    def segment(self, i: int) -> Tensor:
        """All entries `[n, D]` of segment i."""
        return torch.cat([self.old.segment(i), self.new.segment(i)]).to(self.device)

    def like(self, i: int) -> Tensor:
        """A tensor without numbers, of the shape and dtype of segment i."""
        rows = self.new.flat.rows
        return torch.empty(self.lengths[i], rows.shape[1], dtype=rows.dtype, device="meta")

    def extended(self, newer: Cold) -> Cold:
        """Each segment followed by that of `newer`; few new entries alone are copied."""
        parts = [newer.segment(i).cpu() for i in range(len(newer.lengths))]
        new = HostRows.of([torch.cat([self.new.segment(i), p]) for i, p in enumerate(parts)])
        return dataclasses.replace(self, new=new)

    def select(self, segments: list[int]) -> Cold:
        """These segments, in this order."""
        old, new = self.old.select(segments), self.new.select(segments)
        return dataclasses.replace(self, old=old, new=new)

    def kept(self, entries: list[Tensor]) -> Cold:
        """A copy of the `entries`, int64 `[n]`, of each segment."""
        made = Cold.of([self.segment(i)[at] for i, at in enumerate(entries)])
        return dataclasses.replace(made, device=self.device, moved=self.moved)

    def nbytes(self) -> ColdBytes:
        """Bytes of the entries."""
        old, new = self.old.nbytes(), self.new.nbytes()
        return ColdBytes(old.host + new.host, old.filed + new.filed, self.moved.nbytes)


def _none_like(segments: list[Tensor]) -> HostRows:
    return HostRows.of([segment[:0] for segment in segments])
