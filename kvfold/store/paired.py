# SPDX-License-Identifier: Apache-2.0
"""Paired entries: two neighbouring layers share one direction per entry (MiniCache).

Liu et al., arXiv 2405.14366.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.views import Encoded, Flat, Named
from kvfold.store.encoding import Encode

# Beyond this cosine the sine is too small to divide by.
PARALLEL = 1 - 1e-6
TINY = 1e-30


def merge(x_first: Tensor, x_second: Tensor, t: float = 0.6) -> tuple[Tensor, Tensor, Tensor]:
    """Merged unit directions `[n, D]` of two layers' entries `[n, D]`, and both layers' norms.

    Spherical interpolation: `t` runs along the great circle from the first layer (0) to the second
    (1), or along the chord if the two are (anti)parallel. Norms `[n]`; all float32 at least. The
    direction is 0 only if both entries are 0.
    """
    first, second, norm_first, norm_second = _unit_vectors(x_first, x_second)
    cosine = (first * second).sum(-1, keepdim=True)
    angle = cosine.clamp(-PARALLEL, PARALLEL).arccos()
    sine = angle.sin()
    chord = cosine.abs() >= PARALLEL
    of_first = torch.where(chord, 1 - t, ((1 - t) * angle).sin() / sine)
    of_second = torch.where(chord, t, (t * angle).sin() / sine)
    between = of_first * first + of_second * second
    length = between.norm(dim=-1, keepdim=True)
    # Halfway between opposite vectors there is no direction: the first layer's is taken.
    direction = torch.where(length > 1e-3, between / length.clamp(min=TINY), first)
    return direction, norm_first, norm_second


def _unit_vectors(x_first: Tensor, x_second: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both layers' directions `[n, D]`, then norms `[n]`; a zero takes its pair's direction."""
    wide = torch.promote_types(x_first.dtype, torch.float32)
    first, second = x_first.to(wide), x_second.to(wide)
    norms = [x.norm(dim=-1, keepdim=True) for x in (first, second)]
    first, second = (x / n.clamp(min=TINY) for x, n in zip((first, second), norms, strict=True))
    first = torch.where(norms[0] > 0, first, second)
    second = torch.where(norms[1] > 0, second, first)
    return first, second, norms[0].squeeze(-1), norms[1].squeeze(-1)


def retained(x_first: Tensor, x_second: Tensor, gamma: float = 0.05) -> Tensor:
    """Ascending indices of the ⌈gamma · n⌉ entries whose layers `[n, D]` differ most in angle."""
    first, second, _, _ = _unit_vectors(x_first, x_second)
    # Without the margin, 0.07 · 100 would be rounded up to 8.
    count = math.ceil(gamma * len(first) - 1e-9)
    return (first * second).sum(-1).argsort(stable=True)[:count].sort().values


@dataclass(frozen=True)
class Directions:
    """Data that two layers share: directions `rows [sum of lengths, D]`, and retained entries.

    `retained` holds indices within each segment, int32.
    """

    rows: Flat
    retained: Flat

    def extended(self, new: Directions) -> Directions:
        """Each segment followed by that of `new`."""
        counts = torch.tensor(self.rows.lengths, dtype=torch.int32)
        moved = counts.repeat_interleave(torch.tensor(new.retained.lengths))
        later = Flat(new.retained.rows + moved.to(new.retained.rows.device), new.retained.lengths)
        return Directions(self.rows.extended(new.rows), self.retained.extended(later))

    def select(self, segments: list[int]) -> Directions:
        """A copy of these segments, in this order."""
        return Directions(self.rows.select(segments), self.retained.select(segments))


@dataclass(frozen=True)
class Paired:
    """Keys or values of one layer of a pair; `shared` belongs to both layers.

    An entry is its direction times its magnitude; magnitudes `[sum of lengths]`, float32 at least.
    Retained entries are stored unmerged in `exact [retained, D]`.
    """

    shared: Directions
    magnitudes: Flat
    exact: Flat

    @property
    def lengths(self) -> list[int]:
        """Entries of each segment."""
        return self.magnitudes.lengths

    @property
    def rows(self) -> Tensor:
        """All entries `[sum of lengths, D]`, decoded."""
        return torch.cat(self.segments)

    @property
    def segments(self) -> tuple[Tensor, ...]:
        """Entries `[n, D]` of every segment, decoded."""
        return tuple(self.segment(i) for i in range(len(self.lengths)))

    def segment(self, i: int) -> Tensor:
        """Entries `[n, D]` of segment i, decoded."""
        directions = self.shared.rows.segment(i)
        entries = directions * self.magnitudes.segment(i)[:, None]
        retained = self.shared.retained.segment(i).long()
        return entries.to(directions.dtype).index_copy_(0, retained, self.exact.segment(i))

    def extended(self, new: Paired) -> Paired:
        """Each segment followed by that of `new`, not shared; `extend_pair` shares."""
        return self._extended(new, self.shared.extended(new.shared))

    def select(self, segments: list[int]) -> Paired:
        """A copy of these segments, not shared: `RaggedStore.share_with` lets both share again."""
        shared = self.shared.select(segments)
        return Paired(shared, self.magnitudes.select(segments), self.exact.select(segments))

    def tensors(self) -> list[Tensor]:
        """All tensors, the shared ones first."""
        shared = (self.shared.rows, self.shared.retained)
        return [part.rows for part in (*shared, self.magnitudes, self.exact)]

    def named(self) -> Named:
        """All tensors by name, one for each segment, as views."""
        flats = {
            "directions": self.shared.rows,
            "retained": self.shared.retained,
            "magnitudes": self.magnitudes,
            "exact": self.exact,
        }
        return {name: list(flat.segments) for name, flat in flats.items()}

    @classmethod
    def from_named(cls, parts: Named) -> Paired:
        """Copy from what `named` returned, not shared: `RaggedStore.share_with` restores that."""
        shared = Directions(Flat.of(parts["directions"]), Flat.of(parts["retained"]))
        return cls(shared, Flat.of(parts["magnitudes"]), Flat.of(parts["exact"]))

    def _extended(self, new: Paired, shared: Directions) -> Paired:
        return Paired(
            shared, self.magnitudes.extended(new.magnitudes), self.exact.extended(new.exact)
        )


def extend_pair(
    first: Paired, second: Paired, new_first: Paired, new_second: Paired
) -> tuple[Paired, Paired]:
    """Both layers of a pair, each followed by its new entries, with directions still shared."""
    shared = first.shared.extended(new_first.shared)
    return first._extended(new_first, shared), second._extended(new_second, shared)


@dataclass(frozen=True)
class Pairing(Encode):
    """MiniCache's encoding: two neighbouring layers share one direction per entry.

    The share `gamma` of the entries is retained unmerged. Layers from the share `start` of all
    layers on are paired; a last one without a partner stays raw. While decoding, entries are paired
    `block` at a time. Raises KvfoldError for shares outside [0, 1] and blocks below 1.
    """

    t: float = 0.6
    gamma: float = 0.05
    start: float = 0.5
    block: int = 64
    raw: ClassVar[bool] = False
    pairs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("t", "gamma", "start"):
            share = getattr(self, name)
            if not 0 <= share <= 1:
                raise KvfoldError(f"{name} is between 0 and 1, not {share}")
        if self.block < 1:
            raise KvfoldError(f"a block has at least 1 entry, not {self.block}")

    def of_layer(self, layer: int, layers: int) -> Encode | None:
        first = int(layers * self.start)
        last = layers - (layers - first) % 2
        return self if first <= layer < last else None

    def key_count(self, entries: int, encoded: int, decoding: bool) -> int:
        return max(encoded, entries - entries % self.block) if decoding else entries

    def value_count(self, entries: int, encoded: int, decoding: bool) -> int:
        return self.key_count(entries, encoded, decoding)

    def keys_from(self, parts: Named, size: int) -> Encoded:
        return Paired.from_named(parts)

    def values_from(self, parts: Named, size: int) -> Encoded:
        return Paired.from_named(parts)

    def pair(self, first: list[Tensor], second: list[Tensor]) -> tuple[Paired, Paired]:
        """Paired entries of the same segments `[n, D]` in two layers.

        Raises KvfoldError if the layers' segments differ in length.
        """
        lengths = [len(segment) for segment in first]
        if lengths != [len(segment) for segment in second]:
            raise KvfoldError("two layers can only be paired where they hold the same entries")
        both = torch.cat(first), torch.cat(second)
        direction, *norms = merge(*both, self.t)
        rows = direction.to(both[0].dtype)
        # Stored directions are rounded; magnitudes make up for the change in length.
        length = rows.to(direction.dtype).norm(dim=-1).clamp(min=TINY)
        apart = [retained(a, b, self.gamma) for a, b in zip(first, second, strict=True)]
        shared = Directions(Flat(rows, lengths), Flat.of([at.int() for at in apart]))
        layers = zip((first, second), norms, strict=True)
        one, other = (
            Paired(
                shared,
                Flat(norm / length, lengths),
                Flat.of([entries[at] for entries, at in zip(segments, apart, strict=True)]),
            )
            for segments, norm in layers
        )
        return one, other
