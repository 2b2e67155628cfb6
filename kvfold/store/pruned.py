# SPDX-License-Identifier: Apache-2.0
"""Keys without the channels that the queries hardly use (ThinK)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.views import Encoded, Flat, Named
from kvfold.store.encoding import Encode, QueriedKeys


def channel_scores(seen: QueriedKeys, queries: int) -> Tensor:
    """Mean q² of the last `queries` queries times mean k² of all entries: `[B, H, D]` float32.

    The queries' mean is also one over the heads of a group; padding does not count.
    """
    assert seen.queries is not None and seen.query_positions is not None
    of_queries = _mean_square(
        seen.queries[:, :, -queries:], seen.query_positions[:, None, -queries:] >= 0
    )
    return seen.group_mean(of_queries) * _mean_square(seen.keys, seen.positions >= 0)


def _mean_square(rows: Tensor, real: Tensor) -> Tensor:
    """`[B, H, n, D]` → `[B, H, D]`: mean of the squares where `real [B, 1 or H, n]`."""
    squares = rows.float().square().masked_fill(~real[..., None], 0.0)
    return squares.sum(2) / real.sum(2).clamp(min=1)[..., None]


def kept_channels(scores: Tensor, ratio: float) -> Tensor:
    """All but the ⌊D·ratio⌋ channels of lowest score, ascending: `[…, D]` → `[…, D']` int32.

    Of equal scores the earlier channel stays.
    """
    size = scores.shape[-1]
    best = scores.argsort(dim=-1, descending=True, stable=True)
    return best[..., : size - int(size * ratio)].sort(dim=-1).values.int()


@dataclass(frozen=True)
class PrunedKeys:
    """What is left of the keys `[sum of lengths, D']`, of which channels `[segments, D']`."""

    kept: Flat
    channels: Tensor
    size: int

    @classmethod
    def of(cls, segments: list[Tensor], channels: Tensor) -> PrunedKeys:
        """From each segment's keys `[n, D]` and the channels to keep, ascending."""
        pairs = zip(segments, channels.long(), strict=True)
        kept = Flat.of([keys[:, of_segment] for keys, of_segment in pairs])
        return cls(kept, channels, segments[0].shape[1])

    @property
    def lengths(self) -> list[int]:
        return self.kept.lengths

    @property
    def rows(self) -> Tensor:
        return torch.cat(self.segments)

    @property
    def segments(self) -> tuple[Tensor, ...]:
        return tuple(self.segment(i) for i in range(len(self.lengths)))

    def segment(self, i: int) -> Tensor:
        """Keys `[n, D]`, with zeros in the channels that were pruned."""
        kept = self.kept.segment(i)
        keys = kept.new_zeros(len(kept), self.size)
        return keys.index_copy_(1, self.channels[i].long(), kept)

    def extended(self, new: PrunedKeys) -> PrunedKeys:
        """Each segment followed by `new`'s, which has the same channels wherever it must."""
        return PrunedKeys(self.kept.extended(new.kept), new.channels, self.size)

    def select(self, segments: list[int]) -> PrunedKeys:
        return PrunedKeys(self.kept.select(segments), self.channels[segments], self.size)

    def tensors(self) -> list[Tensor]:
        return [self.kept.rows, self.channels]

    def named(self) -> Named:
        return {"kept": list(self.kept.segments), "channels": list(self.channels)}


@dataclass(frozen=True)
class Pruning(Encode):
    """Every key but the `recent` newest loses `ratio` of its channels when a turn ends.

    A segment's channels are chosen once, with the first keys that lose any.
    """

    ratio: float = 0.4
    recent: int = 32
    queries: int = 32
    raw: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise KvfoldError(f"the ratio of channels to prune is in [0, 1), not {self.ratio}")
        if self.recent < 0:
            raise KvfoldError(f"the recent keys that stay whole are 0 or more, not {self.recent}")
        if self.queries < 1:
            raise KvfoldError(f"channels are scored by at least 1 query, not {self.queries}")

    def key_count(self, entries: int, encoded: int, decoding: bool) -> int:
        return encoded if decoding else max(encoded, entries - self.recent)

    def value_count(self, entries: int, encoded: int, decoding: bool) -> int:
        return self.key_count(entries, encoded, decoding)

    def keys(
        self, segments: list[Tensor], seen: QueriedKeys | None, earlier: Encoded | None
    ) -> Encoded:
        assert seen is not None
        channels = kept_channels(channel_scores(seen, self.queries), self.ratio).flatten(0, 1)
        if isinstance(earlier, PrunedKeys):
            chosen = torch.tensor(earlier.lengths, device=channels.device)[:, None] > 0
            channels = torch.where(chosen, earlier.channels, channels)
        return PrunedKeys.of(segments, channels)

    def keys_from(self, parts: Named, size: int) -> Encoded:
        return PrunedKeys(Flat.of(parts["kept"]), torch.stack(parts["channels"]), size)
