# SPDX-License-Identifier: Apache-2.0
"""Entries that are quantized one by one (TurboQuant): none needs another to be decoded.

Keys: rotated codes of a fixed codebook and a length, or FP8 and a scale. Values: scale and minimum.
Zandieh et al., arXiv 2504.19874.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.codebook import (
    centroids,
    looked_up,
    nearest,
    packed,
    rotated,
    rotated_back,
    rotation,
    unpacked,
)
from kvfold.kernels.key_means import KeyMeans
from kvfold.kernels.mean_rotation import Rotate
from kvfold.kernels.views import OTHER, Flat, Form, Named, Standalone

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST = 1e-8  # scale of a value


def quantized_keys(rows: Tensor, bits: int, correct: bool) -> tuple[Tensor, Tensor]:
    """Codes `[n, D·bits / 8]`, uint8, and scale `[n, 1]`, float16, of keys `[n, D]`.

    A key is its scale times the inverse rotation of its centroids; with 8 bits FP8 times its scale.
    With `correct` the decoded key has the length of the key. Raises KvfoldError for keys beyond
    float16.
    """
    wide = _wide(rows)
    if bits == 8:
        scale = _half(wide.abs().amax(1, keepdim=True) / FP8_MAX, "keys")
        steps = wide / scale.to(wide.dtype).masked_fill(scale == 0, 1)
        return steps.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8), scale
    lengths, unit = wide.norm(dim=1, keepdim=True), wide.shape[1] ** 0.5
    codes = nearest(rotated(wide / lengths.masked_fill(lengths == 0, 1)) * unit, bits)
    if correct:
        unit = looked_up(codes, bits, wide.dtype).norm(dim=1, keepdim=True)
    return packed(codes, bits), _half(lengths / unit, "keys")


def quantized_values(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes `[n, Dv·bits / 8]`, uint8, scale and minimum `[n, 2]`, float16, of values `[n, Dv]`.

    Raises KvfoldError for values beyond float16.
    """
    wide, levels = _wide(rows), 2**bits - 1
    low, high = wide.amin(1, keepdim=True), wide.amax(1, keepdim=True)
    scale = ((high - low) / levels).clamp(min=SMALLEST)
    codes = ((wide - low) / scale + 0.5).floor().clamp(0, levels).to(torch.uint8)
    return packed(codes, bits), _half(torch.cat([scale, low], 1), "values")


def _wide(rows: Tensor) -> Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _half(numbers: Tensor, of: str) -> Tensor:
    """Numbers as float16; raises KvfoldError where they are too large for it."""
    half = numbers.half()
    if bool(half.isinf().any()):
        raise KvfoldError(
            f"scales of codes are stored in float16, and {of} of this model are too large for it "
            f"(up to {numbers.nan_to_num(0).abs().max().item():.3g}): choose kivi, or no encoding"
        )
    return half


def _narrow(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in `dtype`; rounding of codes takes none of them beyond its range."""
    most = torch.finfo(dtype).max
    return (wide.clamp(-most, most) if dtype == torch.float16 else wide).to(dtype)


@dataclass(frozen=True)
class PerTokenEncoded(Standalone):
    """Quantized entries, and before them in each segment entries as they came.

    whole `[sum, D]`, in the model's dtype; codes `[sum, bytes]`, uint8; scales `[sum, 1 or 2]`,
    float16.
    """

    numbers: ClassVar[int]  # beside an entry's codes
    whole: Flat
    codes: Flat
    scales: Flat
    bits: int

    @property
    def lengths(self) -> list[int]:
        """Entries of each segment."""
        return [a + b for a, b in zip(self.whole.lengths, self.codes.lengths, strict=True)]

    @property
    def even(self) -> bool:
        """True if all segments have equally many whole entries, and equally many quantized."""
        return len(set(self.whole.lengths)) == len(set(self.codes.lengths)) == 1

    @cached_property
    def form(self) -> Form:
        """For kernels, which take equally many whole entries in each segment."""
        counts = set(self.whole.lengths)
        return Form("per token", counts.pop()) if len(counts) == 1 else OTHER

    @property
    def size(self) -> int:
        """Channels of an entry."""
        return self.whole.rows.shape[1]

    def raw_before(self, newest: Tensor) -> Tensor:
        """Entries `[segments, n, D]` that are not quantized: whole ones, as many in each, first."""
        if not self.whole.lengths[0]:
            return newest
        return torch.cat([self.whole.rows.view(len(newest), -1, self.size), newest], 1)

    @property
    def decoded(self) -> Tensor:
        """The quantized entries of all segments `[sum, D]`, in the model's dtype."""
        return self._decoded(self.codes.rows, self.scales.rows, None)

    @property
    def rows(self) -> Tensor:
        """All entries `[sum of lengths, D]`, decoded together."""
        return torch.cat(self.segments)

    @property
    def segments(self) -> tuple[Tensor, ...]:
        """Entries `[n, D]` of every segment."""
        both = zip(self.whole.segments, self.decoded.split(self.codes.lengths), strict=True)
        return tuple(torch.cat(pair) for pair in both)

    def segment(self, i: int) -> Tensor:
        """Entries `[n, D]` of segment i."""
        of_codes = self._decoded(self.codes.segment(i), self.scales.segment(i), i)
        return torch.cat([self.whole.segment(i), of_codes])

    def extended(self, new: Self) -> Self:
        """Each segment followed by that of `new`, whose whole entries come first in a segment."""
        old = zip(self.codes.lengths, new.whole.lengths, strict=True)
        assert not any(codes and whole for codes, whole in old)
        return self._with(
            self.whole.extended(new.whole),
            self.codes.extended(new.codes),
            self.scales.extended(new.scales),
        )

    def select(self, segments: list[int]) -> Self:
        """A copy of these segments, in this order."""
        parts = self.whole, self.codes, self.scales
        return self._with(*(part.select(segments) for part in parts))

    def kept(self, entries: list[Tensor]) -> Self:
        whole = [at[at < n] for at, n in zip(entries, self.whole.lengths, strict=True)]
        coded = self._coded(entries)
        return self._with(_at(self.whole, whole), _at(self.codes, coded), _at(self.scales, coded))

    def with_codes_of(self, other: Self, places: list[Tensor]) -> Self:
        codes, scales = (
            Flat(flat.rows.clone(), flat.lengths) for flat in (self.codes, self.scales)
        )
        for i, at in enumerate(places):
            theirs = at[self.whole.lengths[i] :] - other.whole.lengths[i]
            known = theirs >= 0
            for mine, part in ((codes, other.codes), (scales, other.scales)):
                mine.segments[i][known] = part.segments[i][theirs[known]]
        return self._with(self.whole, codes, scales)

    def _coded(self, entries: list[Tensor]) -> list[Tensor]:
        """Places among the quantized ones of those of the `entries` of each segment that are."""
        pairs = zip(entries, self.whole.lengths, strict=True)
        return [at[at >= count] - count for at, count in pairs]

    def tensors(self) -> list[Tensor]:
        """Whole entries, codes and scales of all segments."""
        return [self.whole.rows, self.codes.rows, self.scales.rows]

    def named(self) -> Named:
        """Whole entries, codes and scales of each segment, as views."""
        names = ("whole", "codes", "scales")
        return {name: list(getattr(self, name).segments) for name in names}

    @classmethod
    def from_named(cls, parts: Named, bits: int) -> Self:
        """Copy from what `named` returned; raises ValueError for parts that do not fit together."""
        tensors = [parts[name] for name in ("whole", "codes", "scales")]
        for rows, packed_rows, steps in zip(*tensors, strict=True):
            fits = packed_rows.shape[1] * 8 == rows.shape[1] * bits
            fits = fits and steps.shape == (len(packed_rows), cls.numbers)
            if (packed_rows.dtype, steps.dtype) != (torch.uint8, torch.float16) or not fits:
                raise ValueError("codes and scales that do not fit together")
        whole, codes, scales = (Flat.of(each) for each in tensors)
        return cls(whole, codes, scales, bits)

    def _with(self, whole: Flat, codes: Flat, scales: Flat) -> Self:
        return dataclasses.replace(self, whole=whole, codes=codes, scales=scales)

    def _decoded(self, codes: Tensor, scales: Tensor, i: int | None) -> Tensor:
        """Entries `[n, D]` of these codes and scales of segment i; None: of all segments."""
        raise NotImplementedError


@dataclass(frozen=True)
class RotatedKeys(PerTokenEncoded):
    """Quantized keys: of 2, 3 or 4 bits rotated, of 8 bits FP8 without a rotation.

    With `means` codes and scales are of what is left of a key without its segment's mean.
    """

    numbers: ClassVar[int] = 1
    means: KeyMeans | None = None

    @cached_property
    def form(self) -> Form:
        """That of keys beside means is unknown to kernels, which do not add them."""
        return super().form if self.means is None else OTHER

    @classmethod
    def of(
        cls,
        segments: list[Tensor],
        bits: int,
        correct: bool,
        sinks: list[int],
        means: KeyMeans | None = None,
    ) -> RotatedKeys:
        """From each segment's keys `[n, D]`, the first `sinks[i]` of which stay whole."""
        whole, rows, lengths = _divided(segments, sinks)
        rest = rows if means is None else _wide(rows) - means.turned()
        codes, scales = quantized_keys(rest, bits, correct)
        return cls(whole, Flat(codes, lengths), Flat(scales, lengths), bits, means)

    def extended(self, new: Self) -> Self:
        both, known = super().extended(new), self.means or new.means
        if known is None:
            return both
        old, later = (each.means or known.without(each.codes.lengths) for each in (self, new))
        return both.with_means(old.extended(later))

    def select(self, segments: list[int]) -> Self:
        chosen = super().select(segments)
        return chosen if self.means is None else chosen.with_means(self.means.select(segments))

    def kept(self, entries: list[Tensor]) -> Self:
        kept = super().kept(entries)
        if self.means is None:
            return kept
        positions = _at(self.means.positions, self._coded(entries))
        return kept.with_means(dataclasses.replace(self.means, positions=positions))

    def with_codes_of(self, other: Self, places: list[Tensor]) -> Self:
        """As of all entries; codes beside another mean are of other keys, and stay out."""
        mine, theirs = (
            torch.zeros(len(places), each.size, device=each.codes.rows.device)
            if each.means is None
            else each.means.rows
            for each in (self, other)
        )
        same = (mine == theirs).all(1)
        return super().with_codes_of(
            other, [at.masked_fill(~alike, -1) for at, alike in zip(places, same, strict=True)]
        )

    def with_means(self, means: KeyMeans) -> Self:
        """The same codes beside `means`."""
        return dataclasses.replace(self, means=means)

    def tensors(self) -> list[Tensor]:
        return super().tensors() + ([] if self.means is None else self.means.tensors())

    def named(self) -> Named:
        """As of all entries, and the table of centroids with each segment; FP8 has none."""
        parts = super().named()
        if self.means is not None:
            parts |= {"means": list(self.means.rows)}
            parts |= {"positions": list(self.means.positions.segments)}
        if self.bits == 8:
            return parts
        table = centroids(self.bits, torch.float32, self.codes.rows.device)
        return {**parts, "table": [table.clone() for _ in self.lengths]}

    @classmethod
    def from_named(cls, parts: Named, bits: int, rotate: Rotate | None = None) -> Self:
        """As of all entries; raises KvfoldError for codes of another table."""
        for table in parts.get("table", []):
            if not torch.equal(table, centroids(bits, torch.float32, table.device)):
                raise KvfoldError(
                    f"these keys have codes of another table than kvfold's of {bits} bits: "
                    "compress the document again"
                )
        made = super().from_named(parts, bits)
        if "means" not in parts:
            return made
        means = KeyMeans.from_named(parts, made.size, made.codes.lengths, rotate)
        return made.with_means(means)

    def asked(self, query: Tensor) -> Tensor:
        """Queries `[…, D]`, at least float32, whose products with codes are those with keys."""
        wide = _wide(query)
        if self.bits == 8:
            return wide
        return wide @ rotation(wide.shape[-1], wide.dtype, wide.device).T

    def products(self, query: Tensor) -> Tensor:
        """Products `[R, G, n]` of `query [R, G, D]` with all keys of R segments of one length.

        No key is rotated back.
        """
        segments, asked = len(query), self.asked(query)
        if self.bits == 8:
            found = self.codes.rows.view(FP8).to(asked.dtype)
        else:
            found = looked_up(unpacked(self.codes.rows, self.bits), self.bits, asked.dtype)
        rows, scales = found.view(segments, -1, query.shape[-1]), self.scales.rows
        whole = self.whole.rows.view(segments, -1, query.shape[-1])
        of_codes = asked @ rows.transpose(1, 2) * scales.view(segments, 1, -1)
        if self.means is not None:
            turned = self.means.turned().view(rows.shape)
            of_codes = of_codes + _wide(query) @ turned.to(asked.dtype).transpose(1, 2)
        return torch.cat([query @ whole.transpose(1, 2), of_codes.to(query.dtype)], -1)

    def products_of(self, i: int, query: Tensor, asked: Tensor) -> Tensor:
        """Products `[·, n]` of `query [·, D]`, and `asked` of it, with codes of segment i."""
        found = looked_up(unpacked(self.codes.segment(i), self.bits), self.bits, asked.dtype)
        products = asked @ found.T * self.scales.segment(i).T
        if self.means is not None:
            products = products + _wide(query) @ self.means.turned(i).to(asked.dtype).T
        return products

    def _decoded(self, codes: Tensor, scales: Tensor, i: int | None) -> Tensor:
        dtype = self.whole.rows.dtype
        wide = torch.promote_types(dtype, torch.float32)
        if self.bits == 8:
            found = codes.view(FP8).to(wide)
        else:
            found = rotated_back(looked_up(unpacked(codes, self.bits), self.bits, wide))
        found = found * scales
        return _narrow(found if self.means is None else found + self.means.turned(i), dtype)


@dataclass(frozen=True)
class TokenValues(PerTokenEncoded):
    """Quantized values: one scale and one minimum for the channels of an entry."""

    numbers: ClassVar[int] = 2

    @classmethod
    def of(cls, segments: list[Tensor], bits: int, sinks: list[int]) -> TokenValues:
        """From each segment's values `[n, Dv]`, the first `sinks[i]` of which stay whole."""
        whole, rows, lengths = _divided(segments, sinks)
        codes, scales = quantized_values(rows, bits)
        return cls(whole, Flat(codes, lengths), Flat(scales, lengths), bits)

    def _decoded(self, codes: Tensor, scales: Tensor, i: int | None) -> Tensor:
        dtype = self.whole.rows.dtype
        wide = unpacked(codes, self.bits).to(torch.promote_types(dtype, torch.float32))
        return _narrow(wide.mul_(scales[:, :1]).add_(scales[:, 1:]), dtype)


def _divided(segments: list[Tensor], sinks: list[int]) -> tuple[Flat, Tensor, list[int]]:
    """The first `sinks[i]` entries of each segment, the rows of all others, and their numbers."""
    pairs = list(zip(segments, sinks, strict=True))
    others = [rows[count:] for rows, count in pairs]
    whole = Flat.of([rows[:count] for rows, count in pairs])
    return whole, torch.cat(others), [len(rows) for rows in others]


def _at(flat: Flat, entries: list[Tensor]) -> Flat:
    """A copy of the rows at `entries` of each segment."""
    return Flat.of([rows[at] for rows, at in zip(flat.segments, entries, strict=True)])
