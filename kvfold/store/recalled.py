# SPDX-License-Identifier: Apache-2.0
"""`Recalling`: entries go cold instead of away, and codes of their keys stay (recall)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.cold import Cold
from kvfold.kernels.mean_rotation import Rotate
from kvfold.kernels.per_token import RotatedKeys
from kvfold.kernels.recalled import RecalledKeys, RecalledValues
from kvfold.kernels.views import Encoded, Flat, Named
from kvfold.store.encoding import Encode, EntrySize, QueriedKeys, Unencoded
from kvfold.store.per_token import Quantizing

BITS = (1, 2, 3, 4)


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
    raw: ClassVar[bool] = False
    standalone: ClassVar[bool] = True
    recalls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise KvfoldError(f"recall:keys is a number of bits from 1 to 4, not {self.bits}")
        if self.read <= 0 or (self.read > 1 and self.read != int(self.read)):
            raise KvfoldError(
                f"recall:read is a share above 0 and up to 1, or a whole number, not {self.read}"
            )
        if self.residual < 0:
            raise KvfoldError(f"recall:residual is 0 or more, not {self.residual}")

    @property
    def _codes(self) -> Quantizing:
        """The encoding of keys' codes, without raw entries."""
        made = Quantizing(sinks=0, residual=self.residual, rotate=self.rotate)
        object.__setattr__(made, "key_bits", self.bits)  # 1 is too few for keys that are decoded
        return made

    def beside_rope(self, rotate: Rotate | None) -> Self:
        return replace(self, rotate=rotate)

    def fitting(self, room: float, size: EntrySize) -> int:
        raise KvfoldError(
            "recall keeps codes of all tokens, however many come, so a budget in bytes cannot "
            "hold: give the share or the number of entries that stay hot"
        )

    def key_count(self, entries: int, encoded: int, decoding: bool) -> int:
        return self._codes.key_count(entries, encoded, decoding)

    def keys(
        self,
        segments: list[Tensor],
        seen: QueriedKeys | None,
        earlier: Encoded | None,
        among: Unencoded | None = None,
    ) -> RecalledKeys:
        old = earlier.codes if isinstance(earlier, RecalledKeys) else None
        codes = self._codes.keys(segments, seen, old, among)
        assert isinstance(codes, RotatedKeys)
        return RecalledKeys(Cold.of(segments), *_none(segments), codes, self.read)

    def values(self, segments: list[Tensor], earlier: Encoded | None = None) -> RecalledValues:
        return RecalledValues(Cold.of(segments), *_none(segments))

    def keys_from(self, parts: Named, size: int) -> RecalledKeys:
        codes = RotatedKeys.from_named(parts, self.bits, self.rotate)
        return RecalledKeys(*_parts(parts), codes, self.read)

    def values_from(self, parts: Named, size: int) -> RecalledValues:
        return RecalledValues(*_parts(parts))


def _parts(parts: Named) -> tuple[Cold, Flat, Flat]:
    """Cold entries, and places and rows of the hot ones, of a file's tensors."""
    return Cold.of(parts["cold"]), Flat.of(parts["places"]), Flat.of(parts["hot"])


def _none(segments: list[Tensor]) -> tuple[Flat, Flat]:
    """Places and rows of no hot entry."""
    nowhere = torch.empty(0, dtype=torch.long, device=segments[0].device)
    return Flat.of([nowhere] * len(segments)), Flat.of([rows[:0] for rows in segments])
