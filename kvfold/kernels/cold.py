# SPDX-License-Identifier: Apache-2.0
"""`Cold`: entries outside of the model's memory, of which a query reads few."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from kvfold.kernels.cold_bytes import ColdBytes
from kvfold.kernels.per_token import PerTokenEncoded
from kvfold.kernels.views import Named, int64_of, starts_of

PIECE = 48  # bits of a row's number, before that of its piece; as in native/attention.cpp
CODED = "cold_"  # begins the names of quantized entries' parts
_growing = threading.Lock()  # of rooms: only one copy may take one


class ColdRows(Protocol):
    """Rows of several segments, in host memory or in a file."""

    @property
    def lengths(self) -> list[int]:
        """Rows of each segment."""

    def at(self, segments: Tensor, places: Tensor) -> Tensor:
        """The rows `[n, D]` at `places [n]` of these `segments [n]`, which ascend; on the CPU."""

    def segment(self, i: int) -> Tensor:
        """All rows `[n, D]` of segment i, on the CPU."""

    def select(self, segments: list[int]) -> ColdRows:
        """These segments, in this order."""

    def nbytes(self) -> ColdBytes:
        """Bytes of the rows."""


@dataclass(frozen=True)
class HostRows:
    """Rows in host memory, pinned where the model is on a GPU, with room behind each segment's.

    Immutable but for the room. Copies share it: the first to grow takes it, others copy.
    """

    rows: Tensor  # [·, D]
    starts: tuple[int, ...]  # each segment's first row
    lengths: list[int]
    taken: list[int]  # rows of each segment that some copy holds, room in use

    @classmethod
    def of(cls, segments: list[Tensor]) -> HostRows:
        """A copy of each segment's rows `[n, D]`, without room."""
        rows = torch.cat(segments)
        host = rows.cpu()
        lengths = [len(segment) for segment in segments]
        starts = (0, *accumulate(lengths[:-1]))
        return cls(host.pin_memory() if rows.is_cuda else host, starts, lengths, [*lengths])

    def at(self, segments: Tensor, places: Tensor) -> Tensor:
        return self.rows.index_select(0, int64_of(self.starts)[segments] + places)

    def segment(self, i: int) -> Tensor:
        return self.rows[self.starts[i] : self.starts[i] + self.lengths[i]]

    def select(self, segments: list[int]) -> HostRows:
        return HostRows.of([self.segment(i) for i in segments])

    def extended(self, newer: list[Tensor]) -> HostRows:
        """Each segment followed by rows `[n, D]` of the CPU."""
        lengths = [n + len(rows) for n, rows in zip(self.lengths, newer, strict=True)]
        with _growing:
            grown = self if self._has_room(lengths) else self._with_room(2 * max(lengths))
            grown.taken[:] = lengths
        for start, end, rows in zip(grown.starts, lengths, newer, strict=True):
            grown.rows[start + end - len(rows) : start + end] = rows
        return replace(grown, lengths=lengths)

    def _has_room(self, lengths: list[int]) -> bool:
        sizes = zip(self.starts, (*self.starts[1:], len(self.rows)), lengths, strict=True)
        writable = torch.is_inference_mode_enabled() or not self.rows.is_inference()
        fits = all(end - start >= count for start, end, count in sizes)
        return self.taken == self.lengths and fits and writable

    def _with_room(self, each: int) -> HostRows:
        """A copy with room for `each` rows of every segment."""
        count, size = len(self.lengths), self.rows.shape[1]
        rows = self.rows.new_empty(count * each, size, pin_memory=self.rows.is_pinned())
        starts = tuple(range(0, count * each, each))
        for i, start in enumerate(starts):
            rows[start : start + self.lengths[i]] = self.segment(i)
        return HostRows(rows, starts, self.lengths, [*self.lengths])

    def nbytes(self) -> ColdBytes:
        return ColdBytes(self.rows.numel() * self.rows.element_size())


@dataclass(frozen=True)
class CodedRows:
    """Rows that are quantized one by one, in host memory; those that are read are decoded."""

    coded: PerTokenEncoded

    @property
    def lengths(self) -> list[int]:
        return self.coded.lengths

    def at(self, segments: Tensor, places: Tensor) -> Tensor:
        counts = segments.bincount(minlength=len(self.lengths)).tolist()
        return self.coded.kept(list(places.split(counts))).rows

    def segment(self, i: int) -> Tensor:
        return self.coded.segment(i)

    def select(self, segments: list[int]) -> CodedRows:
        return CodedRows(self.coded.select(segments))

    def nbytes(self) -> ColdBytes:
        return ColdBytes(sum(each.numel() * each.element_size() for each in self.coded.tensors()))


class Moved:
    """Bytes of cold entries that queries have read; shared by copies of one layer's store."""

    nbytes = 0


@dataclass(frozen=True)
class Cold:
    """Entries `[n, D]` of each segment, raw or as codes: `old` ones, then `new` ones of the tail.

    Immutable but for `moved`. `device` is the model's. Rows come in two pieces, so that those of a
    file stay there, and those of a prompt are not copied when later ones come.
    """

    old: ColdRows
    new: HostRows
    device: torch.device
    moved: Moved = field(default_factory=Moved)

    @classmethod
    def of(cls, segments: list[Tensor]) -> Cold:
        """A copy of each segment's entries `[n, D]`."""
        return cls(HostRows.of(segments), _none_like(segments), segments[0].device)

    @classmethod
    def holding(cls, old: ColdRows, device: torch.device, size: int, dtype: torch.dtype) -> Cold:
        """The `old` entries, of `size` numbers each, for a model on a `device`."""
        nothing = [torch.empty(0, size, dtype=dtype)] * len(old.lengths)
        return cls(old, HostRows.of(nothing), device)

    @classmethod
    def quantized(cls, coded: PerTokenEncoded, device: torch.device) -> Cold:
        """Entries as codes; those that come later are quantized too."""
        return cls.holding(CodedRows(coded), device, coded.size, coded.whole.rows.dtype)

    @property
    def coded(self) -> PerTokenEncoded | None:
        """The codes of all entries; None for raw ones."""
        return self.old.coded if isinstance(self.old, CodedRows) else None

    @property
    def lengths(self) -> list[int]:
        """Entries of each segment."""
        return [a + b for a, b in zip(self.old.lengths, self.new.lengths, strict=True)]

    def take(self, places: Tensor) -> Tensor:
        """Entries `[R, …, D]` at `places [R, …]` of R segments; zeros where that is below 0."""
        at, like = places.flatten().cpu(), self.new.rows
        segments = torch.arange(len(places)).repeat_interleave(at.numel() // len(places))
        first = torch.tensor(self.old.lengths)[segments]
        rows = like.new_zeros(len(at), like.shape[1])
        old, new = (at >= 0) & (at < first), (at >= first) & (at >= 0)
        for piece, own, places_in in ((self.old, old, at), (self.new, new, at - first)):
            if own.any():
                rows[own] = piece.at(segments[own], places_in[own])
        self.note(int((at >= 0).sum()))
        return rows.to(self.device).unflatten(0, places.shape)

    def alike(self, other: Cold) -> bool:
        """True if the same numbers of rows, as of `pieces`, stand for the same entries in both."""
        return (
            type(self.old) is type(other.old)
            and self.old.lengths == other.old.lengths
            and self.new.lengths == other.new.lengths
            and self.new.starts == other.new.starts
        )

    def pieces(self, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows `[·, D]` of old and of new entries, and the numbers `at` of those that are read.

        These are of `native.attention.find_cold`; of a file, only the rows are there that they
        name, which have other numbers then.
        """
        if isinstance(self.old, HostRows):
            return self.old.rows, self.new.rows, at
        own = (at >> PIECE == 0).nonzero()[:, 0]
        starts, rows = starts_of(tuple(self.old.lengths)), at[own]
        segments = torch.searchsorted(starts, rows, right=True) - 1
        found = self.old.at(segments, rows - starts[segments])
        return found, self.new.rows, at.index_copy(0, own, torch.arange(len(own)))

    def note(self, entries: int) -> None:
        """Notes that queries have read so many entries."""
        raw, coded = [self.new.rows], self.coded
        parts = raw if coded is None else [coded.codes.rows, coded.scales.rows]
        self.moved.nbytes += entries * sum(each.shape[1] * each.element_size() for each in parts)

    def segment(self, i: int) -> Tensor:
        """All entries `[n, D]` of segment i."""
        return torch.cat([self.old.segment(i), self.new.segment(i)]).to(self.device)

    def like(self, i: int) -> Tensor:
        """A tensor without numbers, of the shape and dtype of segment i."""
        rows = self.new.rows
        return torch.empty(self.lengths[i], rows.shape[1], dtype=rows.dtype, device="meta")

    def extended(self, newer: Cold) -> Cold:
        """Each segment followed by that of `newer`, whose rows alone are copied as a rule."""
        if not any(self.lengths):  # as of keys that begin beside others
            return replace(newer, moved=self.moved)
        if self.coded is not None and newer.coded is not None:
            return replace(self, old=CodedRows(self.coded.extended(newer.coded)))
        rows = [newer.segment(i).cpu() for i in range(len(newer.lengths))]
        return replace(self, new=self.new.extended(rows))

    def select(self, segments: list[int]) -> Cold:
        """These segments, in this order."""
        old, new = self.old.select(segments), self.new.select(segments)
        return replace(self, old=old, new=new)

    def kept(self, entries: list[Tensor]) -> Cold:
        """A copy of the `entries`, int64 `[n]`, of each segment."""
        if self.coded is not None:
            return replace(self, old=CodedRows(self.coded.kept(entries)))
        made = Cold.of([self.segment(i)[at] for i, at in enumerate(entries)])
        return replace(made, device=self.device, moved=self.moved)

    def with_codes_of(self, other: Cold, places: list[Tensor]) -> Cold:
        """As `Standalone.with_codes_of`; raw entries have none to keep."""
        if self.coded is None or other.coded is None:
            return self
        return replace(self, old=CodedRows(self.coded.with_codes_of(other.coded, places)))

    def named(self) -> Named:
        """Rows of each segment as "cold"; of quantized ones, their parts as "cold_…"."""
        if self.coded is None:
            return {"cold": [self.segment(i) for i in range(len(self.lengths))]}
        return {CODED + name: parts for name, parts in self.coded.named().items()}

    def nbytes(self) -> ColdBytes:
        """Bytes of the entries."""
        old, new = self.old.nbytes(), self.new.nbytes()
        return ColdBytes(old.host + new.host, old.filed + new.filed, self.moved.nbytes)


def _none_like(segments: list[Tensor]) -> HostRows:
    return HostRows.of([segment[:0] for segment in segments])
