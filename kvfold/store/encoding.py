# SPDX-License-Identifier: Apache-2.0
"""`Encode`: the rule by which a ragged store encodes its oldest entries; this one keeps them raw.

Subclasses quantize (KIVI, TurboQuant), prune channels (ThinK) or pair layers (MiniCache).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, Self

from torch import Tensor

from kvfold.kernels.mean_rotation import Rotate
from kvfold.kernels.views import BLOCK, Encoded, Flat, Named


class QueriedKeys(Protocol):
    """Keys and window queries of a layer: the part of an `Observation` that encodings read."""

    @property
    def keys(self) -> Tensor:
        """Keys `[B, H, T, D]`."""

    @property
    def positions(self) -> Tensor:
        """Positions of the entries `[B, H, T]`, −1 for padding."""

    @property
    def queries(self) -> Tensor | None:
        """Window queries `[B, Hq, W, D]`."""

    @property
    def query_positions(self) -> Tensor | None:
        """Positions of the window queries `[B, W]`, −1 for padding."""

    def group_mean(self, per_query_head: Tensor) -> Tensor:
        """Mean over each group's query heads: `[B, Hq, …]` → `[B, H, …]`."""


class Unencoded(NamedTuple):
    """The keys of each segment that are not encoded `[n, D]`, oldest first, and their positions."""

    keys: list[Tensor]
    positions: list[Tensor]


COLUMN_BYTES = 4  # an entry's column, int32
BIAS_BYTES = 4  # an entry's bias, float32


@dataclass(frozen=True)
class EntrySize:
    """Size of an entry."""

    key: int  # D
    value: int  # Dv
    number: int  # bytes of one number
    bias: int = 0  # bytes of an entry's bias

    @property
    def beside(self) -> int:
        """Bytes of an entry's column and bias."""
        return COLUMN_BYTES + self.bias

    @property
    def whole(self) -> int:
        """Bytes of a raw entry with its column and bias."""
        return (self.key + self.value) * self.number + self.beside


@dataclass(frozen=True)
class Encode:
    """Storage of a layer's oldest entries; this class keeps them raw, in whole blocks.

    Counts are of a segment's oldest entries; newer ones stay raw in the tail. `raw`: true if the
    oldest entries are raw too, so that later prefills may evict them. `standalone`: true if each
    entry is encoded by itself, so that any may be evicted. `recalls`: true if entries that are not
    chosen stay, cold. `pairs`: true if two layers are encoded together.
    """

    raw: ClassVar[bool] = True
    standalone: ClassVar[bool] = False
    recalls: ClassVar[bool] = False
    pairs: ClassVar[bool] = False

    def of_layer(self, layer: int, layers: int) -> Encode | None:
        """Encoding of layer number `layer` of `layers`; None: its entries stay raw."""
        return self

    def beside_rope(self, rotate: Rotate | None) -> Self:
        """The encoding of a layer whose RoPE is `rotate`; None: it is not known."""
        return self

    def fitting(self, room: float, size: EntrySize) -> int:
        """Number of entries of a KV head that certainly fit into `room` bytes."""
        return int(room // size.whole)

    def key_count(self, entries: int, encoded: int, decoding: bool) -> int:
        """Number of oldest keys to be encoded of a segment's `entries`; `encoded` already are."""
        return encoded if decoding else entries - entries % BLOCK

    def value_count(self, entries: int, encoded: int, decoding: bool) -> int:
        """Number of oldest values to be encoded of a segment's `entries`; `encoded` already are."""
        return self.key_count(entries, encoded, decoding)

    def keys(
        self,
        segments: list[Tensor],
        seen: QueriedKeys | None,
        earlier: Encoded | None,
        among: Unencoded | None = None,
    ) -> Encoded:
        """Encoded keys of each segment `[n, D]`, to be appended to `earlier`.

        `seen` is the layer's observation when a prefill ends, None while decoding. `among` are the
        keys that these are the oldest of, for an encoding that is `standalone`.
        """
        return Flat.of(segments)

    def values(self, segments: list[Tensor], earlier: Encoded | None = None) -> Encoded:
        """Encoded values of each segment `[n, Dv]`, to be appended to `earlier`."""
        return Flat.of(segments)

    def keys_from(self, parts: Named, size: int) -> Encoded:
        """Copies of encoded keys of head size `size`, from the tensors of `Encoded.named`."""
        return Flat.of(parts["rows"])

    def values_from(self, parts: Named, size: int) -> Encoded:
        """Copies of encoded values of head size `size`, from the tensors of `Encoded.named`."""
        return Flat.of(parts["rows"])
