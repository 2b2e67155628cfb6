# SPDX-License-Identifier: Apache-2.0
"""Quantized entries of 2, 4 or 8 bits a number: keys per channel, values per token (KIVI).

Liu et al., arXiv 2402.02750.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.dispatch import pack_path
from kvfold.kernels.views import Flat, Form, Named, PartView


def quantize(groups: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and minimum of groups that lie along `dim`.

    Codes are uint8 in the shape of `groups`; scale and minimum have length 1 along `dim` and the
    dtype of `groups`. A code is (x − minimum) / scale, rounded half to even.
    """
    levels = 2**bits - 1
    exact = groups.to(torch.promote_types(groups.dtype, torch.float32))
    minimum, maximum = exact.amin(dim, keepdim=True), exact.amax(dim, keepdim=True)
    # Codes use the scale as stored, so that its rounding adds no error of its own.
    scale = ((maximum - minimum) / levels).to(groups.dtype)
    # The scale is 0 if a group is constant, or its range underflows the dtype: code 0.
    steps = (exact - minimum) / scale.masked_fill(scale == 0, 1)
    return steps.round_().clamp_(0, levels).to(torch.uint8), scale, minimum.to(groups.dtype)


def dequantize(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Code · scale + minimum, rounded once to the dtype of `scale`."""
    wide = codes.to(torch.promote_types(scale.dtype, torch.float32))
    return wide.mul_(scale).add_(minimum).to(scale.dtype)


def pack(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Int32 words of codes `[R, C]`: 32/bits codes along `dim` (0 or 1) each, the first lowest."""
    per_word = 32 // bits
    grouped = codes.int().unflatten(dim, (codes.shape[dim] // per_word, per_word))
    return (grouped << _shifts(bits, dim, codes.device)).sum(dim + 1, dtype=torch.int32)


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Codes `[R, C]`, uint8, of int32 `words` packed along `dim` (0 or 1): inverse of `pack`."""
    if dim == 1:
        return _spread(words, bits)
    codes = (words.unsqueeze(1) >> _shifts(bits, dim, words.device)).to(torch.uint8)
    return codes.bitwise_and_(2**bits - 1).flatten(0, 1)


def _shifts(bits: int, dim: int, device: torch.device) -> Tensor:
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=device)
    return shifts if dim == 1 else shifts[:, None]


def _spread(words: Tensor, bits: int) -> Tensor:
    """Codes packed along the last axis: bytes are split in halves until each holds one code.

    A vector of shifts would work on runs of only 32/bits numbers, and take twice the time.
    """
    codes, width = words.view(torch.uint8), 8
    while width > bits:
        width //= 2
        halves = codes.to(torch.int16)
        halves = (halves | halves << (8 - width)).bitwise_and_(0x0101 * (2**width - 1))
        codes = halves.view(torch.uint8)
    return codes


def _pack_keys(rows: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Words `[n·bits/32, D]`, scale and minimum `[n/group, D]` of keys `[n, D]`."""
    if pack_path(rows, group) == "triton":
        from kvfold.kernels.triton.quantize import pack_keys

        return pack_keys(rows, bits, group)
    codes, scale, minimum = quantize(rows.unflatten(0, (len(rows) // group, group)), bits, 1)
    return pack(codes.flatten(0, 1), bits, 0), scale.squeeze(1), minimum.squeeze(1)


def _pack_values(rows: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Words `[n, Dv·bits/32]`, scale and minimum `[n, Dv/group]` of values `[n, Dv]`."""
    if pack_path(rows, group) == "triton":
        from kvfold.kernels.triton.quantize import pack_values

        return pack_values(rows, bits, group)
    codes, scale, minimum = quantize(rows.unflatten(1, (-1, group)), bits, 2)
    return pack(codes.flatten(1), bits, 1), scale.squeeze(2), minimum.squeeze(2)


PARTS = ("words", "scale", "minimum")  # of all segments


@dataclass(frozen=True)
class _Packed:
    """Packed codes of `bits` each, with scale and minimum of every group of `group` numbers."""

    axis: ClassVar[int]  # along which codes are packed
    words: Flat
    scale: Flat
    minimum: Flat
    bits: int
    group: int

    def extended(self, new: Self) -> Self:
        """Each segment followed by that of `new`."""
        both = {name: getattr(self, name).extended(getattr(new, name)) for name in PARTS}
        return dataclasses.replace(self, **both)

    def select(self, segments: list[int]) -> Self:
        """A copy of these segments, in this order."""
        chosen = {name: getattr(self, name).select(segments) for name in PARTS}
        return dataclasses.replace(self, **chosen)

    def segment(self, i: int) -> Tensor:
        """Dequantized entries `[n, D]` of segment i."""
        parts = (self.words, self.scale, self.minimum)
        return self._decoded(*(part.segment(i) for part in parts))

    @property
    def rows(self) -> Tensor:
        """Dequantized entries `[sum of lengths, D]` of all segments."""
        return self._decoded(self.words.rows, self.scale.rows, self.minimum.rows)

    @property
    def segments(self) -> tuple[Tensor, ...]:
        return self.rows.split(self.lengths)

    def since(self, first: int) -> Tensor:
        """Dequantized entries `[segments, n, D]` from `first` on; segments have equal lengths."""
        words, groups, surplus = self._at(first)
        parts = zip((self.words, self.scale, self.minimum), (words, groups, groups), strict=True)
        of_segments = (
            part.rows.view(len(part.lengths), -1, part.rows.shape[1])[:, start:]
            for part, start in parts
        )
        rows = self._decoded(*(part.flatten(0, 1) for part in of_segments))
        return rows.view(len(self.lengths), -1, rows.shape[1])[:, surplus:]

    def at(self, places: Tensor) -> Tensor:
        """Dequantized entries `[n, D]` at `places [n]` among those of all segments."""
        raise NotImplementedError

    @cached_property
    def form(self) -> Form:
        """For kernels: minima have the dtype of scales."""
        return Form("packed", self.scale.rows.dtype)

    @cached_property
    def last_places(self) -> dict[object, tuple[Tensor, Tensor, Tensor]]:
        """The last result of `_last_places`, whose copies to the device serve many steps."""
        return {}

    @property
    def lengths(self) -> list[int]:
        """Entries of each segment."""
        raise NotImplementedError

    def _at(self, entry: int) -> tuple[int, int, int]:
        """A segment's row of words and row of groups with `entry`, and its offset in the group."""
        raise NotImplementedError

    def _decoded(self, words: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        """Dequantized entries `[n, D]` of these words, scales and minima."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """Words, scale and minimum of all segments."""
        return [self.words.rows, self.scale.rows, self.minimum.rows]

    def named(self) -> Named:
        """Words, scale and minimum of each segment, as views."""
        return {name: list(getattr(self, name).segments) for name in PARTS}

    @classmethod
    def from_named(cls, parts: Named, bits: int, group: int) -> Self:
        """Copy from what `named` returned; raises ValueError for parts that do not fit together."""
        tensors = [parts[name] for name in PARTS]
        for codes, step, lowest in zip(*tensors, strict=True):
            sizes, groups = list(codes.shape), list(step.shape)
            sizes[cls.axis] *= 32 // bits
            groups[cls.axis] *= group
            alike = (step.shape, step.dtype) == (lowest.shape, lowest.dtype)
            if codes.dtype != torch.int32 or sizes != groups or not alike:
                raise ValueError("packed words, scales and minima that do not fit together")
        words, scale, minimum = (Flat.of(each) for each in tensors)
        return cls(words, scale, minimum, bits, group)


@dataclass(frozen=True)
class PackedKeys(_Packed):
    """Packed keys: a group is `group` consecutive entries of one channel.

    A segment's length is a multiple of `group`. words `[sum of lengths · bits / 32, D]` int32;
    scale and minimum `[sum of lengths / group, D]`.
    """

    axis: ClassVar[int] = 0

    @classmethod
    def of(cls, segments: list[Tensor], bits: int, group: int) -> PackedKeys:
        """From each segment's keys `[n, D]`, n a multiple of `group`."""
        lengths = [len(segment) for segment in segments]
        assert not any(n % group for n in lengths)
        words, scale, minimum = _pack_keys(torch.cat(segments), bits, group)
        groups = [n // group for n in lengths]
        codes = Flat(words, [n * bits // 32 for n in lengths])
        return cls(codes, Flat(scale, groups), Flat(minimum, groups), bits, group)

    @cached_property
    def lengths(self) -> list[int]:
        return [n * self.group for n in self.scale.lengths]

    def _at(self, entry: int) -> tuple[int, int, int]:
        before, inside = divmod(entry, self.group)
        return before * self.group * self.bits // 32, before, inside

    def at(self, places: Tensor) -> Tensor:
        per_word = 32 // self.bits
        shifts = places % per_word * self.bits
        codes = (self.words.rows[places // per_word] >> shifts[:, None]) & (2**self.bits - 1)
        groups = places // self.group
        return dequantize(codes, self.scale.rows[groups], self.minimum.rows[groups])

    def _decoded(self, words: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        codes = unpack(words, self.bits, 0)
        codes = codes.unflatten(0, (len(scale), self.group))
        return dequantize(codes, scale[:, None], minimum[:, None]).flatten(0, 1)


@dataclass(frozen=True)
class PackedValues(_Packed):
    """Packed values: a group is `group` consecutive channels of one entry.

    words `[sum of lengths, Dv · bits / 32]` int32; scale, minimum `[sum of lengths, Dv / group]`.
    """

    axis: ClassVar[int] = 1

    @classmethod
    def of(cls, segments: list[Tensor], bits: int, group: int) -> PackedValues:
        """From each segment's values `[n, Dv]`; KvfoldError if `group` does not divide Dv."""
        lengths = [len(segment) for segment in segments]
        rows = torch.cat(segments)
        size = rows.shape[1]
        if size % group:
            raise KvfoldError(
                f"groups of {group} channels do not fill values of head size {size}: "
                f"choose a group that divides {size}"
            )
        words, scale, minimum = _pack_values(rows, bits, group)
        return cls(Flat(words, lengths), Flat(scale, lengths), Flat(minimum, lengths), bits, group)

    @cached_property
    def lengths(self) -> list[int]:
        return self.words.lengths

    def _at(self, entry: int) -> tuple[int, int, int]:
        return entry, entry, 0

    def at(self, places: Tensor) -> Tensor:
        parts = (self.words, self.scale, self.minimum)
        return self._decoded(*(part.rows[places] for part in parts))

    def _decoded(self, words: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        codes = unpack(words, self.bits, 1)
        codes = codes.unflatten(1, (scale.shape[1], self.group))
        return dequantize(codes, scale[..., None], minimum[..., None]).flatten(1)


def not_both_packed(
    of_keys: PartView, keys: PackedKeys, of_values: PartView, values: PackedValues
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Keys and values `[B·H, n, D]` of entries whose key or value is still raw, and gaps.

    They are each segment's newest ones, at the right. The first `gaps[i]` slots of segment i are
    no entry, and hold any finite numbers.
    """
    key_lengths, value_lengths = keys.lengths, values.lengths
    beside, gaps = _not_both(of_keys.gaps, tuple(key_lengths), tuple(value_lengths))
    width = of_keys.tail.shape[2] + beside
    return (
        _newest(of_keys, keys, key_lengths, width, gaps),
        _newest(of_values, values, value_lengths, width, gaps),
        gaps,
    )


@lru_cache(maxsize=512)
def _not_both(
    gaps: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...]
) -> tuple[int, tuple[int, ...]]:
    """Most entries of a segment that are not packed both ways, minus the slots of raw keys; and
    each segment's gap to it. `gaps` are of raw keys. Unchanged until more entries are packed."""
    of_segments = zip(gaps, keys, values, strict=True)
    counts = [max(0, key - value) - gap for gap, key, value in of_segments]
    most = max(counts)
    return most, tuple([most - count for count in counts])


def _newest(
    part: PartView, packed: _Packed, lengths: list[int], width: int, gaps: tuple[int, ...]
) -> Tensor:
    """The last `width − gaps[i]` entries of each segment, at the right of `[B·H, width, D]`."""
    tail = part.tail.flatten(0, 1)
    slots = tail.shape[1]
    if width <= slots - max(part.gaps):
        return tail[:, slots - width :]
    if len({*gaps}) == len({*part.gaps}) == len({*lengths}) == 1:
        raw = tail[:, part.gaps[0] :]
        return torch.cat([packed.since(lengths[0] + raw.shape[1] - width), raw], 1)
    rows = tail.new_zeros(len(tail), width, tail.shape[2])
    shown = min(width, slots)
    rows[:, width - shown :] = tail[:, slots - shown :]
    old = tuple([width - slots + own - gap for gap, own in zip(gaps, part.gaps, strict=True)])
    known = packed.last_places
    found = known.get((old, gaps))
    if found is None:
        found = _last_places(lengths, old, gaps, tail.device)
        # Forks in other threads share it, so it is not read again.
        known.clear()
        known[old, gaps] = found
    places, segment, slot = found
    rows[segment, slot] = packed.at(places)
    return rows


def _last_places(
    lengths: list[int], counts: tuple[int, ...], gaps: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the last `counts[i]` of each segment's `lengths[i]` entries are, and where they go.

    Places `[n]` among the entries of all segments; segments and slots `[n]`, from `gaps[i]` on.
    """
    count, gap = torch.tensor(counts), torch.tensor(gaps)
    segment = torch.arange(len(counts)).repeat_interleave(count)
    nth = torch.arange(len(segment)) - (count.cumsum(0) - count)[segment]
    places = (torch.tensor(lengths).cumsum(0) - count)[segment] + nth
    return places.to(device), segment.to(device), (gap[segment] + nth).to(device)
