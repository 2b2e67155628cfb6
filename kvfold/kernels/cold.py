# SPDX-License-Identifier: Apache-2.0
"""`Cold`: raw entries outside of the model's memory, of which a query reads few."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from kvfold.kernels.cold_bytes import ColdBytes
from kvfold.kernels.views import Flat


class ColdRows(Protocol):
    """Rows of several segments, in host memory or in a file."""

    @property
    def lengths(self) -> list[int]:
        """Rows of each segment."""

    def at(self, segments: Tensor, places: Tensor) -> Tensor:
        """The rows `[n, D]` at `places [n]` of these `segments [n]`, on the CPU."""

    def segment(self, i: int) -> Tensor:
        """All rows `[n, D]` of segment i, on the CPU."""

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
        return self.flat.rows.index_select(0, _starts(tuple(self.lengths))[segments] + places)

    def segment(self, i: int) -> Tensor:
        return self.flat.segments[i]

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
        """Entries `[R, …, D]` at `places [R, …]` of R segments; below 0: those of place 0."""
        shape, at = places.shape, places.flatten().clamp(min=0).cpu()
        segments = torch.arange(len(places)).repeat_interleave(max(1, at.numel() // len(places)))
        first = torch.tensor(self.old.lengths)[segments]
        if bool((at < first).all()):
            rows = self.old.at(segments, at)
        else:
            old, newer = (at < first).nonzero()[:, 0], (at >= first).nonzero()[:, 0]
            found = self.new.at(segments[newer], at[newer] - first[newer])
            rows = found.new_empty(len(at), found.shape[1])
            rows[newer], rows[old] = found, self.old.at(segments[old], at[old])
        self.note(len(rows))
        return rows.to(self.device).unflatten(0, shape)

    @property
    def in_memory(self) -> tuple[Tensor, Tensor] | None:
        """Rows `[·, D]` of the old and of the new entries; None if some are in a file."""
        return (self.old.flat.rows, self.new.flat.rows) if isinstance(self.old, HostRows) else None

    def note(self, entries: int) -> None:
        """Notes that queries have read so many entries."""
        rows = self.new.flat.rows
        self.moved.nbytes += entries * rows.shape[1] * rows.element_size()

    def segment(self, i: int) -> Tensor:
        """All entries `[n, D]` of segment i."""
        return torch.cat([self.old.segment(i), self.new.segment(i)]).to(self.device)

    def extended(self, newer: Cold) -> Cold:
        """Each segment followed by that of `newer`; few new entries alone are copied."""
        parts = [newer.segment(i).cpu() for i in range(len(newer.lengths))]
        new = HostRows.of([torch.cat([self.new.segment(i), p]) for i, p in enumerate(parts)])
        return dataclasses.replace(self, new=new)

    def select(self, segments: list[int]) -> Cold:
        """A copy of these segments, in this order."""
        return self._of([self.segment(i) for i in segments])

    def kept(self, entries: list[Tensor]) -> Cold:
        """A copy of the `entries`, int64 `[n]`, of each segment."""
        return self._of([self.segment(i)[at] for i, at in enumerate(entries)])

    def nbytes(self) -> ColdBytes:
        """Bytes of the entries."""
        old, new = self.old.nbytes(), self.new.nbytes()
        return ColdBytes(old.host + new.host, old.filed + new.filed, self.moved.nbytes)

    def _of(self, segments: list[Tensor]) -> Cold:
        made = Cold.of(segments)
        return dataclasses.replace(made, device=self.device, moved=self.moved)


@lru_cache(maxsize=64)
def _starts(lengths: tuple[int, ...]) -> Tensor:
    """First row of each segment `[R]`, int64, on the CPU."""
    return torch.tensor([0, *accumulate(lengths[:-1])])


def _none_like(segments: list[Tensor]) -> HostRows:
    return HostRows.of([segment[:0] for segment in segments])
