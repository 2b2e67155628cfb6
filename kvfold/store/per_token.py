# SPDX-License-Identifier: Apache-2.0
"""Entries quantized one by one, so that any of them may leave later (TurboQuant)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.kernels.views import Encoded, Named
from kvfold.store.encoding import Encode, EntrySize, QueriedKeys

LOT = 32  # entries quantized together while decoding: each such lot copies all codes once
SCALE_BYTES = 2  # float16


@dataclass(frozen=True)
class Quantizing(Encode):
    """TurboQuant's encoding: every entry but the `sinks` oldest and `residual` newest of a head.

    The first and last `end_layers` layers stay raw. Raises KvfoldError for other bits than 2, 3, 4
    and, of keys, 8, and for negative counts.
    """

    key_bits: int = 4
    value_bits: int = 4
    correct: bool = True
    sinks: int = 4
    residual: int = 32
    end_layers: int = 0
    raw: ClassVar[bool] = False
    standalone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.key_bits not in (2, 3, 4, 8):
            raise KvfoldError(f"keys have 2, 3 or 4 bits, or 8 for FP8, not {self.key_bits}")
        if self.value_bits not in (2, 3, 4):
            raise KvfoldError(f"values have 2, 3 or 4 bits, not {self.value_bits}")
        for name in ("sinks", "residual", "end_layers"):
            if getattr(self, name) < 0:
                raise KvfoldError(f"{name} is 0 or more, not {getattr(self, name)}")

    def of_layer(self, layer: int, layers: int) -> Encode | None:
        return self if self.end_layers <= layer < layers - self.end_layers else None

    def fitting(self, room: float, size: EntrySize) -> int:
        codes = (size.key * self.key_bits + size.value * self.value_bits) / 8
        quantized = codes + 3 * SCALE_BYTES + size.beside
        raw = (self.sinks + self.residual) * (size.whole - quantized)
        return max(super().fitting(room, size), int((room - raw) // quantized))

    def key_count(self, entries: int, encoded: int, decoding: bool) -> int:
        count = entries - self.residual
        if decoding:
            count -= (count - encoded) % LOT
        return max(encoded, count) if count > self.sinks else encoded

    def keys(
        self, segments: list[Tensor], seen: QueriedKeys | None, earlier: Encoded | None
    ) -> Encoded:
        _check_size(segments)
        return RotatedKeys.of(segments, self.key_bits, self.correct, self._first(segments, earlier))

    def values(self, segments: list[Tensor], earlier: Encoded | None = None) -> Encoded:
        _check_size(segments)
        return TokenValues.of(segments, self.value_bits, self._first(segments, earlier))

    def keys_from(self, parts: Named, size: int) -> Encoded:
        return RotatedKeys.from_named(parts, self.key_bits)

    def values_from(self, parts: Named, size: int) -> Encoded:
        return TokenValues.from_named(parts, self.value_bits)

    def _first(self, segments: list[Tensor], earlier: Encoded | None) -> list[int]:
        """Number of first entries of each segment that stay whole: none if others came before."""
        before = [0] * len(segments) if earlier is None else earlier.lengths
        return [
            0 if old else min(self.sinks, len(new))
            for old, new in zip(before, segments, strict=True)
        ]


def _check_size(segments: list[Tensor]) -> None:
    size = segments[0].shape[-1]
    if size % 8:
        raise KvfoldError(
            f"turboquant packs codes of 8 channels into whole bytes, and this model's heads have "
            f"{size} channels: choose kivi, or no encoding"
        )
