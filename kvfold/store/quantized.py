# SPDX-License-Identifier: Apache-2.0
"""Quantized entries of 2, 4 or 8 bits a number: keys per channel, values per token (KIVI).

Liu et al., arXiv 2402.02750. The codes and their layout are in `kernels/packing.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.packing import PackedKeys, PackedValues
from kvfold.kernels.views import Encoded, Named
from kvfold.store.encoding import Encode, EntrySize, QueriedKeys, Unencoded


@dataclass(frozen=True)
class Packing(Encode):
    """KIVI's encoding: keys are packed in blocks of `residual`, values once `residual` are newer.

    Raises KvfoldError for other bits than 2, 4 and 8, for a `group` that does not fill words of 32
    bits, and for a `residual` that is no multiple of `group`.
    """

    key_bits: int = 4
    value_bits: int = 4
    group: int = 32
    residual: int = 128
    raw: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for bits in (self.key_bits, self.value_bits):
            if bits not in (2, 4, 8):
                raise KvfoldError(f"numbers are packed into 2, 4 or 8 bits, not {bits}")
        per_word = 32 // min(self.key_bits, self.value_bits)
        if self.group < 1 or self.group % per_word:
            raise KvfoldError(
                f"a group fills words of 32 bits: it has a multiple of {per_word} numbers here, "
                f"not {self.group}"
            )
        if self.residual < 1 or self.residual % self.group:
            raise KvfoldError(
                f"the residual is packed in whole groups, so it is a multiple of {self.group}, "
                f"not {self.residual}"
            )

    def fitting(self, room: float, size: EntrySize) -> int:
        codes = (size.key * self.key_bits + size.value * self.value_bits) / 8
        scales = 2 * size.number * (size.key + size.value) / self.group
        packed = codes + scales + size.beside
        # At most `residual` keys and `residual` values are raw when a prefill has ended.
        beside = room - self.residual * (size.whole - packed)
        return max(super().fitting(room, size), int(beside // packed))

    def key_count(self, entries: int, encoded: int, decoding: bool) -> int:
        return max(encoded, entries - entries % self.residual)

    def value_count(self, entries: int, encoded: int, decoding: bool) -> int:
        return max(encoded, entries - self.residual)

    def keys(
        self,
        segments: list[Tensor],
        seen: QueriedKeys | None,
        earlier: Encoded | None,
        among: Unencoded | None = None,
    ) -> Encoded:
        return PackedKeys.of(segments, self.key_bits, self.group)

    def values(self, segments: list[Tensor], earlier: Encoded | None = None) -> Encoded:
        return PackedValues.of(segments, self.value_bits, self.group)

    def keys_from(self, parts: Named, size: int) -> Encoded:
        return PackedKeys.from_named(parts, self.key_bits, self.group)

    def values_from(self, parts: Named, size: int) -> Encoded:
        return PackedValues.from_named(parts, self.value_bits, self.group)
