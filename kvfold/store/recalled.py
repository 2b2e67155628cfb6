# SPDX-License-Identifier: Apache-2.0
"""`Recalling`: entries go cold instead of away, and codes of their keys stay (recall)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.cold import CODED, Cold, ColdRows
from kvfold.kernels.mean_rotation import Rotate
from kvfold.kernels.per_token import PerTokenEncoded, RotatedKeys
from kvfold.kernels.recalled import RecalledKeys, RecalledValues
from kvfold.kernels.views import Encoded, Flat, Named
from kvfold.store.encoding import Encode, EntrySize, QueriedKeys, Unencoded
from kvfold.store.per_token import Quantizing


@dataclass(frozen=True)
class KeyCoding(Quantizing):
    """Codes of all keys but the `residual` newest; one bit finds keys, though too few to decode."""

    sinks: int = 0
    key_choices: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)


@dataclass(frozen=True)
class Recalling(Encode):
    """Every entry but the `residual` newest is cold, and found by a code of its key.

    Of those that a method chooses there are hot copies, which every query reads, and of the others
    it reads `read`: a share up to 1, or that many. Cold entries are raw, or have `cold` bits a
    channel. Raises KvfoldError for other bits than 1 to 4, and for numbers out of range.
    """

    bits: int = 2
    read: float = 0.05
    residual: int = 16
    cold: int = 0
    rotate: Rotate | None = field(default=None, compare=False, repr=False)
    # Cold keys and values that stay in a file, while entries are made of its other tensors
    filed: tuple[ColdRows, ColdRows] | None = field(default=None, compare=False, repr=False)
    raw: ClassVar[bool] = False
    standalone: ClassVar[bool] = True
    recalls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bits not in KeyCoding.key_choices:
            raise KvfoldError(f"recall:keys is a number of bits from 1 to 4, not {self.bits}")
        whole = math.isfinite(self.read) and self.read == int(self.read)
        if not (0 < self.read <= 1 or (self.read > 1 and whole)):
            raise KvfoldError(
                f"recall:read is a share above 0 and up to 1, or a whole number, not {self.read}"
            )
        if self.cold not in (0, *Quantizing.value_choices):
            raise KvfoldError(f"recall:cold is 2, 3 or 4 bits, or 0 for raw, not {self.cold}")
        if self.residual < 0:
            raise KvfoldError(f"recall:residual is 0 or more, not {self.residual}")

    @cached_property
    def codes(self) -> KeyCoding:
        """The encoding of the keys' codes."""
        return KeyCoding(self.bits, residual=self.residual, rotate=self.rotate)

    @cached_property
    def cold_codes(self) -> Quantizing | None:
        """The encoding of the cold entries; None: they are raw."""
        if not self.cold:
            return None
        return Quantizing(self.cold, self.cold, sinks=0, residual=0, rotate=self.rotate)

    def beside_rope(self, rotate: Rotate | None) -> Self:
        return replace(self, rotate=rotate)

    def fitting(self, room: float, size: EntrySize) -> int:
        raise KvfoldError(
            "recall keeps codes of all tokens, however many come, so a budget in bytes cannot "
            "hold: give the share or the number of entries that stay hot"
        )

    def key_count(self, entries: int, encoded: int, decoding: bool) -> int:
        return self.codes.key_count(entries, encoded, decoding)

    def keys(
        self,
        segments: list[Tensor],
        seen: QueriedKeys | None,
        earlier: Encoded | None,
        among: Unencoded | None = None,
    ) -> RecalledKeys:
        known = earlier if isinstance(earlier, RecalledKeys) else None
        codes = self.codes.keys(segments, seen, known and known.codes, among)
        assert isinstance(codes, RotatedKeys)
        if self.cold_codes is None:
            cold = Cold.of(segments)
        else:
            own = among and Unencoded(_on_host(among.keys), _on_host(among.positions))
            old = known and known.cold.coded
            coded = self.cold_codes.keys(_on_host(segments), seen, old, own)
            cold = _quantized(coded, segments[0].device)
        return RecalledKeys(cold, *_none(segments), codes, self.read)

    def values(self, segments: list[Tensor], earlier: Encoded | None = None) -> RecalledValues:
        if self.cold_codes is None:
            cold = Cold.of(segments)
        else:
            coded = self.cold_codes.values(_on_host(segments))
            cold = _quantized(coded, segments[0].device)
        return RecalledValues(cold, *_none(segments))

    def keys_from(self, parts: Named, size: int) -> RecalledKeys:
        codes = RotatedKeys.from_named(parts, self.bits, self.rotate)
        codec = self.cold_codes
        coded = None if codec is None else codec.keys_from(_of_cold(parts), size)
        cold, places, hot = _parts(parts, coded, self.filed and self.filed[0])
        if codes.lengths != cold.lengths or any(codes.whole.lengths):
            raise ValueError("codes of other keys than the cold ones")
        return RecalledKeys(cold, places, hot, codes, self.read)

    def values_from(self, parts: Named, size: int) -> RecalledValues:
        codec = self.cold_codes
        coded = None if codec is None else codec.values_from(_of_cold(parts), size)
        return RecalledValues(*_parts(parts, coded, self.filed and self.filed[1]))


def _parts(parts: Named, coded: Encoded | None, filed: ColdRows | None) -> tuple[Cold, Flat, Flat]:
    """Cold entries, `coded`, `filed` or in `parts`, and places and rows of the hot ones.

    Raises ValueError for parts that do not fit together.
    """
    places, hot = Flat.of(parts["places"]), Flat.of(parts["hot"])
    if coded is not None:
        cold = _quantized(coded, hot.rows.device)
    elif filed is not None:
        cold = Cold.holding(filed, hot.rows.device, hot.rows.shape[1], hot.rows.dtype)
    else:
        cold = Cold.of(parts["cold"])
    of_segments = zip(places.segments, cold.lengths, strict=True)
    fits = places.rows.dtype == torch.long and places.lengths == hot.lengths
    if not fits or any(not _ascend(at, count) for at, count in of_segments):
        raise ValueError("hot entries that are none of the cold ones")
    return cold, places, hot


def _quantized(coded: Encoded, device: torch.device) -> Cold:
    """Cold entries of a model on a `device`; raises ValueError for some that are raw."""
    assert isinstance(coded, PerTokenEncoded)
    if any(coded.whole.lengths):
        raise ValueError("cold entries that are not quantized")
    return Cold.quantized(coded, device)


def _of_cold(parts: Named) -> Named:
    """The parts of quantized cold entries, under their own names, in host memory."""
    names = [name for name in parts if name.startswith(CODED)]
    return {name.removeprefix(CODED): _on_host(parts[name]) for name in names}


def _on_host(segments: list[Tensor]) -> list[Tensor]:
    return [rows.cpu() for rows in segments]


def _ascend(places: Tensor, count: int) -> bool:
    """True if places ascend from 0 on and stay below `count`."""
    ends = places.new_tensor([-1]), places.new_tensor([count])
    return bool((torch.cat([ends[0], places, ends[1]]).diff() > 0).all())


def _none(segments: list[Tensor]) -> tuple[Flat, Flat]:
    """Places and rows of no hot entry."""
    nowhere = torch.empty(0, dtype=torch.long, device=segments[0].device)
    return Flat.of([nowhere] * len(segments)), Flat.of([rows[:0] for rows in segments])
