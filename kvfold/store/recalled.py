# SPDX-License-Identifier: Apache-2.0
"""`Recalling`: entries go cold instead of away, and codes of their keys stay (recall)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.cold import Cold, ColdRows
from kvfold.kernels.mean_rotation import Rotate
from kvfold.kernels.per_token import RotatedKeys
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
    it reads `read`: a share up to 1, or that many. Raises KvfoldError for other bits than 1 to 4,
    and for numbers out of range.
    """

    bits: int = 2
    read: float = 0.02
    residual: int = 16
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
        if self.residual < 0:
            raise KvfoldError(f"recall:residual is 0 or more, not {self.residual}")

    @property
    def codes(self) -> KeyCoding:
        """The encoding of the keys' codes."""
        return KeyCoding(self.bits, residual=self.residual, rotate=self.rotate)

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
        old = earlier.codes if isinstance(earlier, RecalledKeys) else None
        codes = self.codes.keys(segments, seen, old, among)
        assert isinstance(codes, RotatedKeys)
        return RecalledKeys(Cold.of(segments), *_none(segments), codes, self.read)

    def values(self, segments: list[Tensor], earlier: Encoded | None = None) -> RecalledValues:
        return RecalledValues(Cold.of(segments), *_none(segments))

    def keys_from(self, parts: Named, size: int) -> RecalledKeys:
        codes = RotatedKeys.from_named(parts, self.bits, self.rotate)
        cold, places, hot = _parts(parts, None if self.filed is None else self.filed[0])
        if codes.lengths != cold.lengths or any(codes.whole.lengths):
            raise ValueError("codes of other keys than the cold ones")
        return RecalledKeys(cold, places, hot, codes, self.read)

    def values_from(self, parts: Named, size: int) -> RecalledValues:
        return RecalledValues(*_parts(parts, None if self.filed is None else self.filed[1]))


def _parts(parts: Named, filed: ColdRows | None) -> tuple[Cold, Flat, Flat]:
    """Cold entries, `filed` or in `parts`, and places and rows of the hot ones.

    Raises ValueError for parts that do not fit together.
    """
    places, hot = Flat.of(parts["places"]), Flat.of(parts["hot"])
    if filed is None:
        cold = Cold.of(parts["cold"])
    else:
        cold = Cold.filed(filed, hot.rows.device, hot.rows.shape[1], hot.rows.dtype)
    of_segments = zip(places.segments, cold.lengths, strict=True)
    fits = places.rows.dtype == torch.long and places.lengths == hot.lengths
    if not fits or any(not _ascend(at, count) for at, count in of_segments):
        raise ValueError("hot entries that are none of the cold ones")
    return cold, places, hot


def _ascend(places: Tensor, count: int) -> bool:
    """True if places ascend from 0 on and stay below `count`."""
    ends = places.new_tensor([-1]), places.new_tensor([count])
    return bool((torch.cat([ends[0], places, ends[1]]).diff() > 0).all())


def _none(segments: list[Tensor]) -> tuple[Flat, Flat]:
    """Places and rows of no hot entry."""
    nowhere = torch.empty(0, dtype=torch.long, device=segments[0].device)
    return Flat.of([nowhere] * len(segments)), Flat.of([rows[:0] for rows in segments])
