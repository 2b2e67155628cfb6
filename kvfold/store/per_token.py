# SPDX-License-Identifier: Apache-2.0
"""Entries quantized one by one, so that any of them may leave later (TurboQuant)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.key_means import KeyMeans, share_a_bias, shared_mean
from kvfold.kernels.mean_rotation import Rotate
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.kernels.views import Encoded, Flat, Named
from kvfold.store.encoding import Encode, EntrySize, QueriedKeys, Unencoded

LOT = 32  # entries quantized together while decoding: each such lot copies all codes once
SCALE_BYTES = 2  # float16
POSITION_BYTES, MEAN_BYTES = 4, 4  # int32 of each key, and float32 of each channel


@dataclass(frozen=True)
class Quantizing(Encode):
    """TurboQuant's encoding: every entry but the `sinks` oldest and `residual` newest of a head.

    The first and last `end_layers` layers stay raw. Where a segment's keys before `rotate`, the
    layer's RoPE, share far more than they differ by, their mean is fixed with its first codes and
    left out of all. Raises KvfoldError for other bits than 2, 3, 4 and, of keys, 8, and for
    negative counts.
    """

    key_bits: int = 4
    value_bits: int = 4
    correct: bool = True
    sinks: int = 4
    residual: int = 32
    end_layers: int = 0
    rotate: Rotate | None = field(default=None, compare=False, repr=False)
    raw: ClassVar[bool] = False
    standalone: ClassVar[bool] = True
    key_choices: ClassVar[tuple[int, ...]] = (2, 3, 4, 8)
    value_choices: ClassVar[tuple[int, ...]] = (2, 3, 4)

    def __post_init__(self) -> None:
        if self.key_bits not in self.key_choices:
            raise KvfoldError(f"keys have 2, 3 or 4 bits, or 8 for FP8, not {self.key_bits}")
        if self.value_bits not in self.value_choices:
            raise KvfoldError(f"values have 2, 3 or 4 bits, not {self.value_bits}")
        for name in ("sinks", "residual", "end_layers"):
            if getattr(self, name) < 0:
                raise KvfoldError(f"{name} is 0 or more, not {getattr(self, name)}")

    def of_layer(self, layer: int, layers: int) -> Encode | None:
        return self if self.end_layers <= layer < layers - self.end_layers else None

    def beside_rope(self, rotate: Rotate | None) -> Self:
        return replace(self, rotate=rotate)

    def fitting(self, room: float, size: EntrySize) -> int:
        codes = (size.key * self.key_bits + size.value * self.value_bits) / 8
        quantized, mean = codes + 3 * SCALE_BYTES + size.beside, 0
        if self.rotate is not None:  # means of keys may be left out
            quantized += POSITION_BYTES
            mean = size.key * max(MEAN_BYTES, size.number)
        raw = (self.sinks + self.residual) * (size.whole - quantized)
        return max(super().fitting(room, size), int((room - mean - raw) // quantized))

    def key_count(self, entries: int, encoded: int, decoding: bool) -> int:
        count = entries - self.residual
        if decoding:
            count -= (count - encoded) % LOT
        return max(encoded, count) if count > self.sinks else encoded

    def keys(
        self,
        segments: list[Tensor],
        seen: QueriedKeys | None,
        earlier: Encoded | None,
        among: Unencoded | None = None,
    ) -> Encoded:
        _check_size(segments)
        sinks, means = self._first(segments, earlier), None
        if among is not None:
            new = [len(keys) - count for keys, count in zip(segments, sinks, strict=True)]
            means = self._means(new, sinks, earlier, among)
        return RotatedKeys.of(segments, self.key_bits, self.correct, sinks, means)

    def values(self, segments: list[Tensor], earlier: Encoded | None = None) -> Encoded:
        _check_size(segments)
        return TokenValues.of(segments, self.value_bits, self._first(segments, earlier))

    def keys_from(self, parts: Named, size: int) -> Encoded:
        return RotatedKeys.from_named(parts, self.key_bits, self.rotate)

    def values_from(self, parts: Named, size: int) -> Encoded:
        return TokenValues.from_named(parts, self.value_bits)

    def _first(self, segments: list[Tensor], earlier: Encoded | None) -> list[int]:
        """Number of first entries of each segment that stay whole: none if others came before."""
        before = [0] * len(segments) if earlier is None else earlier.lengths
        return [
            0 if old else min(self.sinks, len(new))
            for old, new in zip(before, segments, strict=True)
        ]

    def _means(
        self, new: list[int], sinks: list[int], earlier: Encoded | None, among: Unencoded
    ) -> KeyMeans | None:
        """Means beside the `new[i]` next codes of each segment; None if no segment has one.

        Those of segments that have codes already stay.
        """
        old = earlier if isinstance(earlier, RotatedKeys) else None
        coded = [0] * len(new) if old is None else old.codes.lengths
        rows = None if old is None or old.means is None else list(old.means.rows)
        first = [i for i, count in enumerate(new) if count and not coded[i]]
        if rows is not None:
            first = [i for i in first if not rows[i].any()]
        others = {i: (among.keys[i][sinks[i] :], among.positions[i][sinks[i] :]) for i in first}
        if self.rotate is None:
            _warn_of_biases([keys for keys, _ in others.values()])
            return None
        found = {i: shared_mean(_turned_back(*each, self.rotate)) for i, each in others.items()}
        if rows is None:
            if not any(bool(mean.any()) for mean in found.values()):
                return None
            rows = [torch.zeros_like(next(iter(found.values())))] * len(new)
        means = torch.stack([found.get(i, row) for i, row in enumerate(rows)])
        at = [
            places[count : count + more].int()[:, None]
            for places, count, more in zip(among.positions, sinks, new, strict=True)
        ]
        return KeyMeans(means, Flat.of(at), self.rotate)


def _turned_back(keys: Tensor, positions: Tensor, rotate: Rotate) -> Tensor:
    """Keys `[n, D]` before RoPE, at least float32, without those of padding."""
    keys, positions = keys[positions >= 0], positions[positions >= 0]
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    return rotate(wide[None, None], -positions[None])[0, 0]


def _warn_of_biases(segments: list[Tensor]) -> None:
    """Warns where a segment's keys share far more than they differ by."""
    if any(share_a_bias(keys) for keys in segments):
        warnings.warn(
            "this model's keys have large biases, which hide their differences in codes, and "
            "kvfold cannot rotate its keys back to leave these out, so answers may be wrong: "
            "choose kivi",
            stacklevel=2,
        )


def _check_size(segments: list[Tensor]) -> None:
    size = segments[0].shape[-1]
    if size % 8:
        raise KvfoldError(
            f"codes of 8 channels are packed into whole bytes, and this model's heads have "
            f"{size} channels: choose kivi, or no encoding"
        )
