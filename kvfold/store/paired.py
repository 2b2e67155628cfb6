# SPDX-License-Identifier: Apache-2.0
"""Entries of two neighbouring layers that share one direction (MiniCache)."""

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
    """Unit directions `[n, D]` between those of two layers' entries, and both layers' norms `[n]`.

    `t` goes along the great circle from the first (0) to the second (1), or along the chord where
    the two are (anti)parallel. All float32 at least. Only two zero vectors have direction 0.
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
    # Half way between opposite vectors there is no direction: the first layer's will do.
    direction = torch.where(length > 1e-3, between / length.clamp(min=TINY), first)
    return direction, norm_first, norm_second


def _unit_vectors(x_first: Tensor, x_second: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both layers' directions and norms; a zero vector takes its partner's direction."""
    wide = torch.promote_types(x_first.dtype, torch.float32)
    first, second = x_first.to(wide), x_second.to(wide)
    norms = [x.norm(dim=-1, keepdim=True) for x in (first, second)]
    first, second = (x / n.clamp(min=TINY) for x, n in zip((first, second), norms, strict=True))
    first = torch.where(norms[0] > 0, first, second)
    second = torch.where(norms[1] > 0, second, first)
    return first, second, norms[0].squeeze(-1), norms[1].squeeze(-1)


def retained(x_first: Tensor, x_second: Tensor, gamma: float = 0.05) -> Tensor:
    """The ⌈gamma · n⌉ of n entries `[n, D]` whose two layers differ most in angle, ascending."""
    first, second, _, _ = _unit_vectors(x_first, x_second)
    # Without the margin, 0.07 · 100 would be rounded up to 8.
    count = math.ceil(gamma * len(first) - 1e-9)
    return (first * second).sum(-1).argsort(stable=True)[:count].sort().values


@dataclass(frozen=True)
class Directions:
    """What two layers share: directions `[sum of lengths, D]`, and which entries are retained.

    `retained` holds each segment's indices, int32.
    """

    rows: Flat
    retained: Flat

    def extended(self, new: Directions) -> Directions:
        """Each segment followed by `new`'s."""
        counts = torch.tensor(self.rows.lengths, dtype=torch.int32)
        moved = counts.repeat_interleave(torch.tensor(new.retained.lengths))
        later = Flat(new.retained.rows + moved.to(new.retained.rows.device), new.retained.lengths)
        return Directions(self.rows.extended(new.rows), self.retained.extended(later))

    def select(self, segments: list[int]) -> Directions:
        """A copy of these segments."""
        return Directions(self.rows.select(segments), self.retained.select(segments))


@dataclass(frozen=True)
class Paired:
    """One layer of a pair, which owns `shared` together with the other.

    magnitudes `[sum of lengths]`, float32 at least, make directions entries again; retained ones
    are `exact`, `[retained, D]`.
    """

    shared: Directions
    magnitudes: Flat
    exact: Flat

    @property
    def lengths(self) -> list[int]:
        return self.magnitudes.lengths

    @property
    def rows(self) -> Tensor:
        return torch.cat(self.segments)

    @property
    def segments(self) -> tuple[Tensor, ...]:
        return tuple(self.segment(i) for i in range(len(self.lengths)))

    def segment(self, i: int) -> Tensor:
        directions = self.shared.rows.segment(i)
        entries = directions * self.magnitudes.segment(i)[:, None]
        retained = self.shared.retained.segment(i).long()
        return entries.to(directions.dtype).index_copy_(0, retained, self.exact.segment(i))

    def extended(self, new: Paired) -> Paired:
        """Each segment followed by `new`'s, in memory of its own: see `extend_pair`."""
        return self._extended(new, self.shared.extended(new.shared))

    def select(self, segments: list[int]) -> Paired:
        """A copy of these segments, in memory of its own: the cache lets partners share again."""
        shared = self.shared.select(segments)
        return Paired(shared, self.magnitudes.select(segments), self.exact.select(segments))

    def tensors(self) -> list[Tensor]:
        shared = (self.shared.rows, self.shared.retained)
        return [part.rows for part in (*shared, self.magnitudes, self.exact)]

    def named(self) -> Named:
        flats = {
            "directions": self.shared.rows,
            "retained": self.shared.retained,
            "magnitudes": self.magnitudes,
            "exact": self.exact,
        }
        return {name: list(flat.segments) for name, flat in flats.items()}

    @classmethod
    def from_named(cls, parts: Named) -> Paired:
        """The same again, in memory of its own: the cache lets partners share again."""
        shared = Directions(Flat.of(parts["directions"]), Flat.of(parts["retained"]))
        return cls(shared, Flat.of(parts["magnitudes"]), Flat.of(parts["exact"]))

    def _extended(self, new: Paired, shared: Directions) -> Paired:
        return Paired(
            shared, self.magnitudes.extended(new.magnitudes), self.exact.extended(new.exact)
        )


def extend_pair(
    first: Paired, second: Paired, new_first: Paired, new_second: Paired
) -> tuple[Paired, Paired]:
    """Both layers of a pair, each followed by its new entries; they go on sharing."""
    shared = first.shared.extended(new_first.shared)
    return first._extended(new_first, shared), second._extended(new_second, shared)


@dataclass(frozen=True)
class Pairing(Encode):
    """Two neighbouring layers keep one direction an entry, and `gamma` of the entries whole.

    Layers from the share `start` on are paired; one that is left over stays as it came. While
    decoding, entries are paired `block` at a time.
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
        """The same segments of two layers `[n, D]`; raises KvfoldError if they are not the same."""
        lengths = [len(segment) for segment in first]
        if lengths != [len(segment) for segment in second]:
            raise KvfoldError("two layers can only be paired where they hold the same entries")
        both = torch.cat(first), torch.cat(second)
        direction, *norms = merge(*both, self.t)
        rows = direction.to(both[0].dtype)
        # What is stored has been rounded: magnitudes make up for the length it lost.
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
